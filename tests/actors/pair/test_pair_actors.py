"""The processes of a pair see their own GPUs, counted as NVML counts, and Ray hides none of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.pair import pair_actors
from actors.pair.pair_actors import DraftActor, PairActors, TargetActor
from actors.settings import DraftSettings, PairDevices, PairSettings, ProcessShare
from engine.config import EngineConfig, ModelConfig
from protos.messages import SpeculationMethod

MODEL = ModelConfig("m")


@dataclass
class RecordedRay:
    """Stands where `ray.remote` does, and keeps the environment that each class's actors were to have."""

    environments: dict[type, dict[str, str]] = field(default_factory=dict)

    def __call__(self, actor: type) -> Recorded:
        return Recorded(self, actor)


@dataclass
class Recorded:
    ray: RecordedRay
    actor: type

    def options(self, **options: Any) -> Recorded:
        self.ray.environments[self.actor] = options["runtime_env"]["env_vars"]
        return self

    def remote(self, *args: Any) -> Recorded:
        return self

    @property
    def ready(self) -> Any:
        return SimpleNamespace(remote=lambda: asyncio.sleep(0))


async def environments_on(
    devices: PairDevices, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[type, dict[str, str]]:
    recorded = RecordedRay()
    monkeypatch.setattr(ray, "remote", recorded)
    monkeypatch.setattr(pair_actors.ray.util, "get_current_placement_group", lambda: None)
    draft = DraftSettings(SpeculationMethod.MODEL, MODEL)
    settings = PairSettings(EngineConfig(MODEL), draft=draft, target_share=ProcessShare(2), draft_share=ProcessShare(1))
    await PairActors(settings, folder, devices, None).start()
    return recorded.environments


async def test_each_process_sees_its_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By UUID and MIG ids, in PCI order: CUDA's own order puts the fastest card first, and indices mean another one."""
    environments = await environments_on(PairDevices(("GPU-a", "MIG-b"), "GPU-c"), tmp_path, monkeypatch)
    assert environments[TargetActor]["CUDA_VISIBLE_DEVICES"] == "GPU-a,MIG-b"
    assert environments[DraftActor]["CUDA_VISIBLE_DEVICES"] == "GPU-c"
    for environment in environments.values():
        assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0", "Ray hides them from actors without num_gpus"


async def test_processes_of_a_pair_without_gpus_see_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = await environments_on(PairDevices(), tmp_path, monkeypatch)
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in environments.values()} == {""}

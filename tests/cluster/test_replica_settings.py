"""Every key of deploy.yaml's `args` arrives in the settings of a pair and of a prefill replica."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from safetensors.numpy import save_file

from actors.settings import (
    AutoTuneSettings,
    DraftSettings,
    KVTransportKind,
    PairSettings,
    PrefillSettings,
    ProcessShare,
)
from cluster.app import _prefill_options, _router_config
from cluster.config import DeployConfig, parse_config
from cluster.placement import NodeResources, PairPlacement, plan_pair
from cluster.replica_settings import pair_settings, prefill_settings
from cluster.schema.replicas import IngressSection
from cluster.topology import NodeTopology
from engine.config import (
    AttentionKind,
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    KVDtype,
    ModelConfig,
    ModelDtype,
    Quantization,
    SamplingSource,
    SchedulerConfig,
    ScorerKind,
    SpeculationConfig,
    StepConfig,
)
from protos.errors import ConfigError
from protos.messages import SpeculationMethod, VerifyMode
from router.config import RouterConfig
from tests.engine.fixtures.byte_tokenizer import write_tokenizer

TEMPLATE = "{{ messages }}"
PLACEMENT = PairPlacement(ProcessShare(5, 4.5), ProcessShare(6, 5.5), 0, prefill=ProcessShare(7, 6.5))


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Three models: a target and two drafts."""
    for name in ("target", "draft", "other"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        save_file({"weight": np.zeros(4)}, folder / "model.safetensors")
        write_tokenizer(folder)
    return [str(tmp_path / name) for name in ("target", "draft", "other")]


def with_models(paths: list[str], log: str) -> dict[str, Any]:
    """Two draft models, and each key that they allow."""
    target, draft, other = paths
    return {
        "model_id": "m",
        "target": {
            "path": target,
            "dtype": "float32",
            "quantization": "int8",
            "attention": "torch",
            "deterministic": True,
            "generation_config": "none",
            "cuda_graphs": "off",
            "num_threads": 3,
        },
        "draft": {
            "kind": "model",
            "path": draft,
            "dtype": "bfloat16",
            "quantization": "int4",
            "num_threads": 2,
            "gpu": "own",
        },
        "drafts": {"other": other},
        "speculation": {
            "num_tokens": 5,
            "max_num_tokens": 9,
            "verify": "rejection",
            "method": "ngram",
            "adaptive": True,
            "target_itl_ms": 40,
            "steps": {"judge": "likelihood"},
        },
        "cache": {"block_size": 32, "memory_gib": 2, "dtype": "int8"},
        "scheduler": {
            "max_num_sequences": 8,
            "max_tokens_per_step": 700,
            "max_stall_passes": 2.5,
            "max_model_len": 100,
        },
        "pair": {
            "num_replicas": 2,
            "resources": {"fast": 1},
            "max_queued_requests": 4,
            "gpus": {"count": 2, "kind": "H100"},
            "kv_events": {"endpoint": "tcp://127.0.0.1:6000"},
        },
        "prefill": {
            "num_replicas": 4,
            "resources": {"slow": 2},
            "min_remote_prefill_tokens": 300,
            "kv_transport": "object_store",
        },
        "router": {"policy": "load", "index_timeout_ms": 70},
        "ingress": {"chat_template": TEMPLATE, "num_replicas": 6},
        "tune": {"log": log, "auto": True},
    }


def with_a_head(paths: list[str]) -> dict[str, Any]:
    """A sharded target with a head, and each key that these allow."""
    return {
        "model_id": "m",
        "target": {"path": paths[0], "tensor_parallel_size": 2},
        "draft": {"kind": "eagle3", "path": paths[1]},
        "speculation": {"tree": {"num_nodes": 6}},
        "cache": {"num_blocks": 99},
        "pair": {"autoscaling": {"min_replicas": 2, "max_replicas": 3, "ttft_s": 1, "itl_ms": 50}},
        "prefill": {"autoscaling": {"min_replicas": 2, "max_replicas": 5, "ttft_s": 2}},
    }


def of_itself(paths: list[str]) -> dict[str, Any]:
    """A target that drafts for itself, with a share of a GPU."""
    return {
        "model_id": "m",
        "target": {"path": paths[0]},
        "draft": {"kind": "self", "quantization": "int8", "num_layers": 1},
        "cache": {"gpu_memory_utilization": 0.5},
    }


def ahead(paths: list[str]) -> dict[str, Any]:
    """A draft that drafts while the target verifies."""
    return {
        "model_id": "m",
        "target": {"path": paths[0]},
        "draft": {"kind": "model", "path": paths[1], "gpu": "own"},
        "speculation": {"mode": "async", "adaptive": False, "num_tokens": 5},
    }


def test_each_setting_of_models_arrives(paths: list[str], tmp_path: Path) -> None:
    target, draft, other = paths
    log = str(tmp_path / "log")
    config = parse_config(with_models(paths, log))
    steps = StepConfig(judge=ScorerKind.LIKELIHOOD)
    model = ModelConfig(
        draft,
        ModelDtype.BFLOAT16,
        quantization=Quantization.INT4,
        num_threads=6,
        attention=AttentionKind.TORCH,
        generation_config=SamplingSource.NONE,
        graphs=GraphConfig(GraphKind.OFF),
    )
    pool = CacheConfig(32, memory_bytes=1 << 29)
    engine = EngineConfig(
        ModelConfig(
            target,
            ModelDtype.FLOAT32,
            quantization=Quantization.INT8,
            num_threads=5,
            attention=AttentionKind.TORCH,
            deterministic=True,
            generation_config=SamplingSource.NONE,
            chat_template=TEMPLATE,
            graphs=GraphConfig(GraphKind.OFF),
        ),
        CacheConfig(32, memory_bytes=2 << 30, dtype=KVDtype.INT8),
        SchedulerConfig(8, 700, 2.5, 100),
        SpeculationConfig(
            5,
            VerifyMode.REJECTION,
            9,
            ("ngram", "model", "other", "hybrid", "suffix", "none"),
            adaptive=True,
            steps=steps,
            target_itl_s=0.04,
        ),
        min_remote_prefill_tokens=300,
        log=log,
    )
    settings = pair_settings(config, PLACEMENT)
    command = ("-m", "cluster.cli", "tune", "--log", log, "--target", target, "--minutes", "10", "--fresh", "20000")
    kind = SpeculationMethod.MODEL
    assert settings == PairSettings(
        engine,
        DraftSettings(kind, model, pool),
        ProcessShare(5, 4.5),
        ProcessShare(6, 5.5),
        kv_transport=KVTransportKind.OBJECT_STORE,
        max_requests=12,
        kv_events="tcp://127.0.0.1:6000",
        auto_tune=AutoTuneSettings(command, f"{log}.drafts"),
        more_drafts=(DraftSettings(kind, replace(model, path=other), pool, name="other"),),
    )
    prefill = prefill_settings(config, settings.engine, PLACEMENT)
    assert prefill == PrefillSettings(
        replace(
            engine,
            model=replace(engine.model, num_threads=7),
            scheduler=replace(engine.scheduler, max_tokens_per_step=512),
            log=None,
        ),
        niceness=10,
        kv_transport=KVTransportKind.OBJECT_STORE,
    )


def test_each_setting_of_a_head_arrives(paths: list[str]) -> None:
    config = parse_config(with_a_head(paths))
    engine = EngineConfig(
        ModelConfig(paths[0], num_threads=5, tensor_parallel_size=2),
        CacheConfig(num_blocks=99, memory_bytes=None),
        speculation=SpeculationConfig(
            methods=("eagle3", "hybrid", "suffix", "ngram", "none"), tree_nodes=6, adaptive=True
        ),
        head=HeadConfig(HeadKind.EAGLE3, paths[1]),
    )
    settings = pair_settings(config, replace(PLACEMENT, draft=None, num_gpus=2))
    assert settings == PairSettings(engine, DraftSettings(SpeculationMethod.EAGLE3), ProcessShare(5, 4.5))
    prefill = prefill_settings(config, settings.engine, replace(PLACEMENT, num_gpus=2))
    model = replace(engine.model, num_threads=7, graphs=GraphConfig(GraphKind.OFF))
    assert prefill == PrefillSettings(replace(engine, model=model, scheduler=SchedulerConfig(max_tokens_per_step=512)))


def test_each_setting_of_a_target_that_drafts_for_itself_arrives(paths: list[str]) -> None:
    settings = pair_settings(parse_config(of_itself(paths)), replace(PLACEMENT, draft=None, num_gpus=1))
    assert settings.engine.head == HeadConfig(HeadKind.SELF, None, Quantization.INT8, 1)
    assert settings.engine.cache == CacheConfig(gpu_memory_utilization=0.5)
    assert settings.draft == DraftSettings(SpeculationMethod.SELF)


def test_each_setting_of_a_draft_that_drafts_ahead_arrives(paths: list[str]) -> None:
    settings = pair_settings(parse_config(ahead(paths)), PLACEMENT)
    assert settings.draft.is_ahead
    methods = "model", "hybrid", "suffix", "ngram", "none"
    assert settings.engine.speculation == SpeculationConfig(5, methods=methods, can_draft_ahead=True)


def of_a_class(paths: list[str]) -> dict[str, Any]:
    """A class of the operator's that drafts."""
    return {"model_id": "m", "target": {"path": paths[0]}, "draft": {"kind": "python", "code": "drafts:Mine"}}


def test_each_setting_of_a_class_that_drafts_arrives(paths: list[str]) -> None:
    settings = pair_settings(parse_config(of_a_class(paths)), PLACEMENT)
    assert settings.draft == DraftSettings(SpeculationMethod.PYTHON, code="drafts:Mine")


def test_each_setting_of_placement_and_routing_arrives(paths: list[str], tmp_path: Path) -> None:
    config = parse_config(with_models(paths, str(tmp_path / "log")))
    nodes, topology = [NodeResources(64, 8)], NodeTopology()
    assert plan_pair(config, nodes, topology) == PairPlacement(
        ProcessShare(3, 2.01),
        ProcessShare(2, 1.34),
        2,
        prefill=ProcessShare(3, 3),
        num_prefill_gpus=1,
        resources={"accelerator_type:H100": 0.001, "fast": 1},
        prefill_resources={"accelerator_type:H100": 0.001, "slow": 2},
        num_drafts=2,
    )
    with pytest.raises(ConfigError, match="3 pairs and 5 prefill replicas need 2 GPUs each"):
        plan_pair(parse_config(with_a_head(paths)), nodes, topology)
    assert plan_pair(parse_config(ahead(paths)), nodes, topology).target == ProcessShare(48, 47.77)
    assert _router_config(config) == RouterConfig(32, "load", index_timeout_s=0.07)


def test_each_option_of_prefill_replicas_arrives(paths: list[str], tmp_path: Path) -> None:
    config = parse_config(with_models(paths, str(tmp_path / "log")))
    placement = replace(PLACEMENT, num_prefill_gpus=2, prefill_resources={"slow": 2})
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "PASSIVE"}
    assert _prefill_options(config, placement, ProcessShare(7, 6.5)) == {
        "num_replicas": 4,
        "ray_actor_options": {
            "num_cpus": 6.5,
            "num_gpus": 2,
            "resources": {"slow": 2},
            "runtime_env": {"env_vars": environment},
        },
        "max_ongoing_requests": 8 + 64,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": 30.0,
    }


def test_no_setting_keeps_its_default_here(paths: list[str], tmp_path: Path) -> None:
    """A default would hide a setting that is lost on its way; test_ingress_settings.py has the frontends' keys."""
    files = [
        with_models(paths, str(tmp_path / "log")),
        with_a_head(paths),
        of_itself(paths),
        ahead(paths),
        of_a_class(paths),
    ]
    configs = [parse_config(args) for args in files]
    changed = {name for each in configs for name in changes(each)}
    assert keys(DeployConfig) - changed == set()


def sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections in a key's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in getattr(annotation, "__args__", ()) for each in sections(part)]


def keys(section: type[BaseModel], path: str = "") -> set[str]:
    """Return the path of every key below a section that has no keys of its own, without the frontends'."""
    found = set[str]()
    for name, field in section.model_fields.items():
        below = [each for each in sections(field.annotation) if each is not IngressSection]
        found |= {key for each in below for key in keys(each, f"{path}{name}.")} or {path + name}
    return found - {"ingress"}


def changes(section: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the path of each key that has another value than its default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                yield from changes(each, f"{path}{name}.")
        if field.is_required() or value != field.get_default(call_default_factory=True):
            yield path + name

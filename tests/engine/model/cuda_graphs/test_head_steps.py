"""Recorded steps of a recurrent head draft the tokens of steps that the host lays out one by one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch.draft import Draft
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core.core import EngineCore
from engine.engine_core.loading import load_engine
from engine.model.cuda_graphs.draft_steps import DraftSteps
from engine.model.cuda_graphs.graph_runner import CudaGraphRunner
from engine.model.gpu_memory import CardMemory, MemoryMeter
from engine.model.runner.model_runner import ModelRunner
from engine.sampling.step_draw import DrawKind
from engine.sequence.batch import DraftQuery
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod
from tests.engine.fixtures.heads.eagle3_fixtures import head_tensors, write_original
from tests.engine.fixtures.heads.heads_fixtures import write_llama_with_mtp

TAPS = (1, 2)  # of a target with two layers
KINDS = (HeadKind.EAGLE3, HeadKind.MTP)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("heads")
    write_llama_with_mtp(root / "target", num_mtp_layers=2)
    write_original(root / "eagle3", head_tensors(root / "target", len(TAPS)), TAPS)
    return root


def build(root: Path, kind: HeadKind, graphs: GraphKind, attention: str = "torch") -> EngineCore:
    device = "cuda" if attention == "triton" and torch.cuda.is_available() else "cpu"
    if device == "cuda" and graphs is GraphKind.EAGER:
        graphs = GraphKind.AUTO
    recorded = GraphConfig(graphs, batches=(1, 2, 4))
    config = EngineConfig(
        ModelConfig(str(root / "target"), "float32", device, attention=attention, graphs=recorded),
        CacheConfig(8, 128),
        SchedulerConfig(max_model_len=120),
        SpeculationConfig(5, methods=(SpeculationMethod(kind),)),
        HeadConfig(kind, None if kind is HeadKind.MTP else str(root / kind)),
    )
    return load_engine(config)


def drafted(engine: EngineCore, num_requests: int = 4) -> tuple[dict[str, tuple[int, ...]], list[Draft]]:
    """Texts of requests that end one after the other, and every draft of the head."""
    head, drafts = engine._speculation.head, []
    assert head is not None
    propose = head.propose

    def recording(queries: Seq[DraftQuery]) -> list[Draft]:
        found = propose(queries)
        drafts.extend(found)
        return found

    head.propose = recording  # type: ignore[method-assign]
    for index in range(num_requests):
        sampling = SamplingParams(
            temperature=(0.0, 0.7)[index % 2], top_p=(1.0, 0.9)[index // 2 % 2], seed=index, max_tokens=9 + index
        )
        engine.add(GenerateRequest(str(index), tuple(range(1, 4 + 3 * index)), sampling))
    texts: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for chunk in engine.step():
            texts[chunk.request_id] = texts.get(chunk.request_id, ()) + chunk.token_ids
        engine.scheduler.check_integrity()
    del head.propose
    return texts, drafts


def runner_of(engine: EngineCore) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_heads_steps_draft_what_the_host_would_have_drafted_token_by_token(
    root: Path, num_begun: list[int], kind: HeadKind, attention: str
) -> None:
    plain = drafted(build(root, kind, GraphKind.OFF))
    assert not num_begun
    assert drafted(build(root, kind, GraphKind.EAGER, attention)) == plain
    assert len(num_begun) > 5
    assert max(map(len, (draft.token_ids for draft in plain[1]))) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_the_step_before_change_drafts(root: Path, kind: HeadKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that reads the states before the last token; its texts are the same, as verification is exact."""
    texts, drafts = drafted(build(root, kind, GraphKind.OFF))
    draw_and_take = DraftSteps._draw_and_take

    def forgetful(steps: DraftSteps, kind: DrawKind) -> torch.Tensor:
        assert steps._states is not None
        before = steps._states.current.clone()
        token_ids = draw_and_take(steps, kind)
        steps._states.current.copy_(before)
        return token_ids

    monkeypatch.setattr(DraftSteps, "_draw_and_take", forgetful)
    found, others = drafted(build(root, kind, GraphKind.EAGER))
    assert found == texts
    assert others != drafts


def test_an_exchanged_head_drafts_in_its_own_steps(root: Path, num_begun: list[int], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(9)
    tensors = head_tensors(root / "target", len(TAPS))
    noisy = {
        name: each + 0.2 * torch.randn(each.shape, generator=generator)
        for name, each in tensors.items()
        if each.is_floating_point()
    }
    write_original(tmp_path / "other", tensors | noisy, TAPS)
    found = []
    for graphs in (GraphKind.OFF, GraphKind.EAGER):
        engine = build(root, HeadKind.EAGLE3, graphs)
        first = drafted(engine)
        engine.exchange_head(runner_of(engine).load_head(str(tmp_path / "other")))
        num_begun.clear()
        found.append(drafted(engine))
        assert found[-1][1] != first[1]
    assert found[0] == found[1]
    assert num_begun


def test_a_model_without_recordings_has_no_steps(root: Path) -> None:
    assert runner_of(build(root, HeadKind.EAGLE3, GraphKind.OFF))._head_graphs is None


def test_the_memory_of_a_heads_steps_is_tried_before_the_pool_takes_the_rest(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with fixed figures replaces a GPU."""
    tried: list[int | None] = []

    def recorder(*args: Any, trial_pool_tokens: int | None) -> CudaGraphRunner:
        tried.append(trial_pool_tokens)
        return CudaGraphRunner(*args, trial_pool_tokens=trial_pool_tokens)

    cache = CacheConfig(8, gpu_memory_utilization=0.5)
    left = MemoryMeter(cache, lambda: CardMemory(1 << 22, 1 << 22))
    monkeypatch.setattr("engine.model.runner.model_runner.memory_meter", lambda cache, device: left)
    monkeypatch.setattr("engine.model.runner.head_steps.CudaGraphRunner", recorder)
    graphs = GraphConfig(GraphKind.EAGER, batches=(1, 2), row_counts=(1, 3), max_rows=32)
    model = ModelConfig(str(root / "target"), "float32", "cpu", graphs=graphs)
    runner = ModelRunner(model, cache, head=HeadConfig(HeadKind.EAGLE3, str(root / "eagle3")))
    tokens, real = tried
    assert real is None
    assert tokens is not None
    assert tokens >= runner.num_blocks * 8

"""States of recurrent layers come from a prefill engine with the blocks that they follow, and change no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.accounting.engine_stats import FetchFailure
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.kv_cache.state_pool import StatePool
from engine.remote_prefill.kv_transfer import FetchNews, KVChunk
from protos.messages import GenerateRequest, SamplingParams
from tests.engine.fixtures.hybrids import HYBRIDS, VOCAB_SIZE, write_hybrid
from tests.engine.fixtures.in_process_transport import Fault, InProcessTransport, intact, lost_after

P = 4
Texts = dict[str, list[int]]


@pytest.fixture(scope="module", params=["lfm2", "mamba2", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return written(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return written(tmp_path_factory.mktemp("lfm2"), "lfm2")


def written(folder: Path, family: str) -> ModelConfig:
    write_hybrid(folder, HYBRIDS[family]())
    return ModelConfig(str(folder), dtype="float32")


def build(model: ModelConfig, chunk: int = 64, transport: InProcessTransport | None = None) -> EngineCore:
    config = EngineConfig(
        model,
        CacheConfig(P, 256, memory_bytes=None),
        SchedulerConfig(max_num_sequences=8, max_tokens_per_step=chunk, max_model_len=100),
        min_remote_prefill_tokens=8,
    )
    return load_engine(config, transport=transport)


def requests() -> list[GenerateRequest]:
    """The prompts have 30 to 65 tokens; all but the first begin with the same 13, and the last two are equal."""
    generator = torch.Generator().manual_seed(2)
    shared, *own = (torch.randint(1, VOCAB_SIZE, (size,), generator=generator).tolist() for size in (13, 30, 25, 52))
    prompts = [own[0], *([*shared, *each] for each in (*own[1:], own[2]))]
    return [
        GenerateRequest(str(index), tuple(prompt), SamplingParams(temperature=1.0, seed=7, max_tokens=10))
        for index, prompt in enumerate(prompts)
    ]


def run(core: EngineCore, wanted: list[GenerateRequest]) -> Texts:
    texts: Texts = {each.request_id: [] for each in wanted}
    for each in wanted:
        core.add(each)
    for _ in range(3_000):
        if not core.has_work:
            return texts
        for chunk in core.step():
            texts[chunk.request_id] += chunk.token_ids
        core.scheduler.check_integrity()
    raise AssertionError("the engine makes no progress")


def fetched(model: ModelConfig, fault: Fault = intact, chunk: int = 14) -> tuple[Texts, Any]:
    """Texts of two rounds, the second after prefix hits, and the numbers of remote prefill."""
    core = build(model, transport=InProcessTransport(build(model, chunk), fault))
    texts = run(core, requests())
    assert run(core, requests()) == texts
    return texts, core.stats().remote


@pytest.mark.parametrize("chunk", [5, 14, 64])
def test_remote_and_local_prefill_give_the_same_tokens(model: ModelConfig, chunk: int):
    texts, remote = fetched(model, chunk=chunk)
    assert texts == run(build(model), requests())
    assert remote.num_tokens > 60
    assert not remote.failures


def without_states(news: FetchNews) -> list[FetchNews]:
    return [replace(news, state=None)] if isinstance(news, KVChunk) else [news]


def with_short_states(news: FetchNews) -> list[FetchNews]:
    is_cut = isinstance(news, KVChunk) and news.state is not None
    return [replace(news, state=news.state[:-4])] if is_cut else [news]  # type: ignore[union-attr, type-var, index]


@pytest.mark.parametrize(
    ("fault", "failure"),
    [(lost_after(1), FetchFailure.LOST), (without_states, None), (with_short_states, FetchFailure.GARBLED)],
)
def test_a_state_that_does_not_come_costs_no_token(lfm2: ModelConfig, fault: Fault, failure: FetchFailure | None):
    texts, remote = fetched(lfm2, fault)
    assert texts == run(build(lfm2), requests())
    assert set(remote.failures) == ({failure} if failure else set())


def test_a_wrong_state_changes_texts(lfm2: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    plain = run(build(lfm2), requests())
    export = StatePool.export_state
    monkeypatch.setattr(StatePool, "export_state", lambda pool, slot: export(pool, 0))
    assert fetched(lfm2)[0] != plain


def test_engines_whose_states_differ_exchange_no_blocks(lfm2: ModelConfig):
    layout = build(lfm2).runner.kv_layout
    other = replace(layout, states=layout.states[:-1])
    assert "states is" in str(layout.difference(other))

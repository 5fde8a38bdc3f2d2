"""A draft model in the target's process: it drafts, changes no token, and its failure costs drafts only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.draft.draft_process import InProcessDraft
from actors.settings import DraftSettings, PairSettings
from engine.accounting.engine_stats import DraftStats
from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.engine_core.loading import load_engine
from engine.proposer.method_dispatcher import proposer_of
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod
from tests.engine.fixtures.checkpoints import write_checkpoint

REQUESTS = [
    GenerateRequest(str(index), (5, 6, 7 + index), SamplingParams(temperature=0.7 * (index % 2), seed=3, max_tokens=24))
    for index in range(3)
]


Run = tuple[dict[str, tuple[int, ...]], DraftStats]


def settings(folder: Path) -> PairSettings:
    model = ModelConfig(str(folder), dtype="float32", device="cpu")
    cache = CacheConfig(num_blocks=64)
    speculation = SpeculationConfig(3, methods=(SpeculationMethod.MODEL,))
    return PairSettings(
        EngineConfig(model, cache, speculation=speculation), DraftSettings(SpeculationMethod.MODEL, model, cache)
    )


def texts(pair: PairSettings, draft: InProcessDraft | None, on_step: Callable[[int], None] = lambda _: None) -> Run:
    core = load_engine(pair.engine, draft and proposer_of(pair.engine.speculation.methods, draft))
    for request in REQUESTS:
        core.add(request)
    found: dict[str, tuple[int, ...]] = {}
    num_steps = 0
    while core.has_work:
        on_step(num_steps)
        num_steps += 1
        for chunk in core.step():
            found[chunk.request_id] = found.get(chunk.request_id, ()) + chunk.token_ids
    return found, core.stats().drafts


def test_a_draft_in_the_targets_process_drafts_and_changes_no_token(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=1)
    pair = settings(tmp_path)
    draft = InProcessDraft(pair)
    plain, _ = texts(pair, None)
    drafted, stats = texts(pair, draft)
    assert drafted == plain
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30  # it is the target's twin
    assert draft.stats.is_connected


def test_a_draft_that_fails_is_off_and_plain_decoding_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, seed=1)
    pair = settings(tmp_path)
    draft = InProcessDraft(pair)
    plain, _ = texts(pair, None)

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    def break_it(num_steps: int) -> None:
        if num_steps == 3:
            monkeypatch.setattr(draft._drafter, "propose", fail)

    with caplog.at_level(logging.ERROR):
        drafted, stats = texts(pair, draft, break_it)
    assert drafted == plain
    assert 0 < stats.num_accepted_tokens < 30
    assert not draft.stats.is_connected
    assert [record.message for record in caplog.records] == [
        "the draft failed in the target's process and is off; plain decoding continues"
    ]

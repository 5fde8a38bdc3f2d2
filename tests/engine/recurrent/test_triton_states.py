"""Engines whose recurrent layers are Triton's: recorded passes keep the states of plain ones, drafts change no text."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch.span import Span, SpanStates
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core.loading import load_engine
from engine.model import packed_decoder
from engine.model.cuda_graphs.graph_runner import RecordedStep
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.runner.model_runner import ModelRunner
from engine.recurrent.mixer import are_recordable
from protos.messages import SpeculationMethod
from tests.engine.fixtures.attention_fixtures import DEVICE
from tests.engine.fixtures.hybrids import HYBRIDS, VOCAB_SIZE, write_hybrid
from tests.engine.recurrent.long_texts import Drafts, Place, Texts, requests

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.recurrent import triton_mixer

# Few heads: an interpreted program takes a millisecond or more.
CHANGES: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "mamba2": {"num_hidden_layers": 2, "num_heads": 2, "head_dim": 32},
    "qwen3_5_text": {
        **{"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_value_head_dim": 16},
        **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    },
}
GRAPHS = GraphConfig(GraphKind.AUTO if DEVICE.type == "cuda" else GraphKind.EAGER, batches=(2,), row_counts=(1, 4))
NO_GRAPHS = GraphConfig(GraphKind.OFF)
BLOCK_SIZE = 4


@pytest.fixture
def triton_mixers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of recurrent layers that Triton computes, model by model; a processor counts as a GPU for them."""
    counts: list[int] = []
    use = triton_mixer.use_triton_mixers

    def counted(*arguments: Any) -> int:
        counts.append(use(*arguments))
        return counts[-1]

    monkeypatch.setattr(triton_mixer, "use_triton_mixers", counted)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(FusedDecoder, "fits", staticmethod(lambda *_: False))
        monkeypatch.setattr(packed_decoder, "runs_triton", lambda tensor: True)
    return counts


def write(folder: Path, name: str) -> Path:
    config = HYBRIDS[name]()
    for key, value in CHANGES[name].items():
        setattr(config, key, value)
    write_hybrid(folder, config)
    return folder


def runner(folder: Path, graphs: GraphConfig) -> ModelRunner:
    model = ModelConfig(str(folder), "float32", DEVICE.type, graphs=graphs)
    return ModelRunner(model, CacheConfig(BLOCK_SIZE, num_blocks=40, num_states=32))


def random_passes(num_passes: int) -> list[list[Span]]:
    """Prompts of three sequences, then passes of 1 to 4 rows of some of them, each from a state that a pass has left.

    A sequence has nine slots: of the state before a pass, and after each of its rows.
    """
    rng, slots = random.Random(0), [list(range(1 + 9 * index, 10 + 9 * index)) for index in range(3)]
    lengths, before = [0, 0, 0], [0, 0, 0]
    passes = []
    for number in range(num_passes):
        spans = []
        for index in range(3) if number == 0 else rng.sample(range(3), rng.randrange(1, 4)):
            num_rows = rng.randrange(3, 8) if number == 0 else rng.randrange(1, 5)
            free = [slot for slot in slots[index] if slot != before[index]]
            after = {row: free[row] for row in range(1, num_rows + 1)}
            token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(num_rows)]
            table, states = range(12 * index, 12 * index + 12), SpanStates(before[index], after)
            spans.append(Span(token_ids, lengths[index], table, num_rows, states=states))
            kept = rng.randrange(1, num_rows + 1)
            lengths[index], before[index] = lengths[index] + kept, after[kept]
        passes.append(spans)
    return passes


@pytest.mark.parametrize("name", CHANGES)
def test_recorded_passes_keep_the_states_of_plain_ones(name: str, tmp_path: Path, triton_mixers: list[int]) -> None:
    """With a GPU its recordings are replayed; else these are the very buffers."""
    folder = write(tmp_path, name)
    plain, padded = runner(folder, NO_GRAPHS), runner(folder, GRAPHS)
    assert len(triton_mixers) == 2
    assert min(triton_mixers) > 0
    assert padded._graphs is not None
    assert padded._graphs.has_passes
    num_recorded = 0
    for spans in random_passes(7):
        num_recorded += padded._graphs._fitting(spans) is not None
        expected, logits = plain.forward(spans), padded.forward(spans)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for slot in range(32):
            ours, theirs = (each.export_state(slot).view(torch.float32) for each in (padded, plain))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert num_recorded > 1
    assert not padded.export_state(0).any(), "a padded row has left a state in the zeros"


def test_recorded_steps_of_a_draft_model_go_on_from_their_own_states(tmp_path: Path, triton_mixers: list[int]) -> None:
    """One branch keeps a state after each token, the other its last one alone. The host lays out step by step."""
    folder = write(tmp_path, "lfm2")
    plain, padded = runner(folder, NO_GRAPHS), runner(folder, replace(GRAPHS, draft_ids_end=VOCAB_SIZE))
    prompts = [Span([5, 6, 7, 8], 0, [index], 1, states=SpanStates(0, {4: 1 + index})) for index in range(2)]
    slots = ({1: 3, 2: 4, 3: 5}, dict.fromkeys(range(1, 4), 6))
    spans = [
        Span([0] * 3, 4, [index, 2 + index], 3, states=SpanStates(1 + index, after))
        for index, after in enumerate(slots)
    ]
    for each in (plain, padded):
        each.forward(prompts)
    assert padded.draft_steps(spans) is None
    steps, recorded = plain.plan_own_steps(spans), padded.plan_own_steps(spans)
    assert all(isinstance(step, RecordedStep) for step in recorded)
    for number, pair in enumerate(zip(steps, recorded, strict=True)):
        for step in pair:
            step.input_ids.copy_(torch.tensor([9 + number, 40 - number]))
        expected, logits = (each.run(step) for each, step in zip((plain, padded), pair, strict=True))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_recurrent_layers_that_are_not_tritons_are_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.recurrent.triton_mixer.mixer_forms", lambda model: [])
    caplog.set_level(logging.INFO)
    assert runner(write(tmp_path, "lfm2"), GRAPHS)._graphs is None
    assert "passes are not recorded: CUDA graphs need recurrent layers that our Triton kernels compute" in caplog.text


def texts_of(folder: Path, graphs: GraphConfig, known: Texts | None = None, *, chunk: int = 64) -> tuple[Texts, int]:
    """Return texts of every temperature, drafted from the `known` ones with wrong tokens, and the accepted drafts."""
    num_drafts = 0 if known is None else 3
    config = EngineConfig(
        ModelConfig(str(folder), "float32", "cpu", deterministic=True, graphs=graphs),
        CacheConfig(BLOCK_SIZE, num_blocks=60, memory_bytes=None),
        SchedulerConfig(2, chunk, max_model_len=48),
        SpeculationConfig(num_drafts, max_num_tokens=num_drafts, methods=(SpeculationMethod.MODEL,)),
    )
    core = load_engine(config, None if known is None else Drafts(known))
    texts = Place([core]).run(list(requests(0, length=6))[9:12])
    return texts, core.stats().drafts.num_accepted_tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's stock norms give rows other bits in other company")
def test_drafts_chunks_and_recordings_change_no_text(tmp_path: Path, triton_mixers: list[int]) -> None:
    folder = write(tmp_path, "qwen3_5_text")
    expected, _ = texts_of(folder, NO_GRAPHS)
    assert len({tuple(text) for text in expected.values()}) == 3
    found, num_accepted = texts_of(folder, GRAPHS, expected, chunk=11)
    assert found == expected
    assert num_accepted > 0
    assert len(triton_mixers) == 2


def test_a_model_without_recurrent_layers_may_be_recorded() -> None:
    assert are_recordable(torch.nn.Linear(2, 2))

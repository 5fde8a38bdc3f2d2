"""The suite's pieces: a recorded target says what was recorded, whoever drafts, and counts its passes rightly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from bench.suffix_replay import replay
from bench.suite.methods import PLAIN, Suite
from bench.suite.runner import Run
from bench.suite.workload import Turn, Workload
from engine.config import CacheConfig
from engine.proposer.suffix import SuffixProposer
from models.architecture import llama_config, new_model
from models.checkpoint import save_checkpoint
from protos.messages import SamplingParams


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    for seed, half in enumerate(("target", "draft")):
        config = llama_config(num_layers=1, hidden_size=64, mlp_size=64, num_heads=1, num_kv_heads=1)
        save_checkpoint(new_model(config, seed), folder / half)
    return folder


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A method sets torch's threads; put them back."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


PERIODIC = tuple([11, 12, 13, 14] * 6)


@pytest.mark.parametrize("name", [PLAIN, "ngram", "suffix", "draft", "draft, tree", "hybrid"])
def test_a_recorded_answer_is_said_in_as_few_passes_as_the_drafts_allow(demo: Path, name: str) -> None:
    turns = [Turn((1, 2, 3), PERIODIC), Turn((4, 5, 6, 7), PERIODIC[:9])]
    with ExitStack() as stack:
        suite = Suite(demo / "target", demo, "float32", CacheConfig(num_blocks=64, memory_bytes=None), stack)
        method = suite.methods([name])[-1]
        engine, verifier = method.engine()
        said: dict[str, list[int]] = {}
        step = engine.step

        def recording_step() -> list:
            chunks = step()
            for chunk in chunks:
                said.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            return chunks

        engine.step = recording_step  # type: ignore[method-assign]
        measured = Run(
            engine, verifier, Workload("recorded", [turns, turns[:1]]), 50, SamplingParams(temperature=0.0)
        ).measure(lambda: None)
    assert sorted(map(len, said.values())) == [9, 24, 24]
    assert said["0/1"] == list(PERIODIC)
    assert measured.num_tokens == 57
    if name == PLAIN:
        assert measured.tokens_per_pass == 1.0
    if name in ("ngram", "suffix", "hybrid"):
        assert measured.tokens_per_pass > 2.0
    if name in ("ngram", "suffix"):
        assert measured.accepted_by_position[0] > 0.5


def test_answers_that_were_not_recorded_come_from_the_target(demo: Path) -> None:
    with ExitStack() as stack:
        suite = Suite(demo / "target", demo, "float32", CacheConfig(num_blocks=64, memory_bytes=None), stack)
        engine, verifier = suite.methods([PLAIN])[0].engine()
        workload = Workload("free", [[Turn((1, 2, 3))], [Turn((3, 2, 1))]])
        measured = Run(engine, verifier, workload, 5, SamplingParams(temperature=0.0)).measure(lambda: None)
    assert (measured.num_tokens, measured.num_passes) == (10, 10)


def test_a_replay_of_suffixes_counts_passes_rows_and_tokens() -> None:
    count = replay([Turn((1, 2, 3), PERIODIC), Turn((9, 1, 2, 3), PERIODIC)], 8, SuffixProposer())
    assert count.num_tokens == 48
    assert count.num_passes < 24, "the second answer was said before"
    assert count.num_rows > count.num_passes
    assert replay([Turn((1, 2, 3), (5, 6, 7))], 0, SuffixProposer()).num_passes == 3

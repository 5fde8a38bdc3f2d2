"""The suite's pieces: a recorded target gives the recorded answer with any drafter, and counts its passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from bench.padded_pair import DEMO
from bench.speculation.methods import PLAIN, Suite
from bench.speculation.workload import Turn, Workload, WorkloadRun, agent_sessions
from engine.config import CacheConfig
from models.training.architecture import llama_config, new_model, save_checkpoint
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
        engine = method.engine()
        said: dict[str, list[int]] = {}
        step = engine.core.step

        def recording_step() -> list:
            chunks = step()
            for chunk in chunks:
                said.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            return chunks

        engine.core.step = recording_step  # type: ignore[method-assign]
        workload = Workload("recorded", [turns, turns[:1]])
        measured = WorkloadRun(engine, workload, None, SamplingParams(temperature=0.0)).measure(lambda: None)
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
        engine = suite.methods([PLAIN])[0].engine()
        workload = Workload("free", [[Turn((1, 2, 3))], [Turn((3, 2, 1))]])
        measured = WorkloadRun(engine, workload, 5, SamplingParams(temperature=0.0)).measure(lambda: None)
    assert (measured.num_tokens, measured.num_passes) == (10, 10)


APERIODIC = tuple(range(100, 140))


@pytest.mark.parametrize("name", [PLAIN, "suffix", "hybrid"])
@pytest.mark.parametrize("is_told", [True, False])
def test_history_is_drafted_from_and_not_run(demo: Path, name: str, is_told: bool) -> None:
    history = [Turn((1, 2, 3), APERIODIC, is_run=False)] if is_told else []
    with ExitStack() as stack:
        suite = Suite(demo / "target", demo, "float32", CacheConfig(num_blocks=64, memory_bytes=None), stack)
        engine = suite.methods([name])[-1].engine()
        workload = Workload("recorded", [[*history, Turn((9, 2, 3), APERIODIC)]])
        measured = WorkloadRun(engine, workload, None, SamplingParams(temperature=0.0)).measure(lambda: None)
        assert engine.core.stats().num_running == 0
    assert measured.num_tokens == 40
    assert (measured.tokens_per_pass > 4.0) == (is_told and name != PLAIN)


def test_a_recording_is_dealt_out_whole_and_evenly() -> None:
    sessions = [[Turn((1,), (place,) * length)] for place, length in enumerate((2, 9, 4, 5, 1, 3))]
    workload = Workload("recorded", sessions)
    for num_streams in (1, 2, 3, 8):
        streams = workload.at(num_streams).streams
        assert len(streams) == num_streams
        assert {turn for stream in streams for turn in stream} == {turn for each in sessions for turn in each}
    said = [sum(len(turn.answer or ()) for turn in stream) for stream in workload.at(2).streams]
    assert said == [12, 12]
    assert Workload("free", [[Turn((1,))], [Turn((2,))]]).at(1).streams == [[Turn((1,))]]


def test_calls_of_all_ages_are_run_and_the_rest_is_history(demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "calls.jsonl"
    calls = [
        {"timestamp": 10 * place + session, "session_id": str(session), "input": "a b c " * place, "output": "x y z"}
        for place in range(6)
        for session in range(2)
    ]
    trace.write_text("\n".join(json.dumps(call) for call in calls))
    sessions = agent_sessions(DEMO / "target", trace, every=4, max_tokens=1000).streams
    assert [[turn.is_run for turn in session] for session in sessions] == [
        [False, False, True, False, False, False],
        [True, False, False, False, True, False],
    ]
    lengths = [len(turn.prompt) for turn in sessions[0]]
    assert lengths == sorted(lengths)
    short = agent_sessions(DEMO / "target", trace, every=1, max_tokens=lengths[3]).streams
    assert [turn.is_run for turn in short[0]] == [True, True, True, False, False, False]
    with pytest.raises(ValueError, match="no call is run of one in 4 with 1 tokens"):
        agent_sessions(DEMO / "target", trace, every=4, max_tokens=1)

"""The texts of the methods: streams of turns, from the demo's own files or from files given by path."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer

from bench.contenders.prompts import held_out_prompts
from bench.simulator.trace_file import read_lines


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, and the answer that was recorded for it where the workload is a recording.

    A turn that is not run is history: the drafter has seen it, as if it had been served, and the target has not.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None = None
    is_run: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` run at once; the turns of a stream one after the other.

    With recorded answers the target computes its passes and then gives the recorded answer: a small model
    stands in thus for the one that the text came from. Such a text has no temperature, so it is run greedily alone.
    """

    name: str
    streams: Seq[Seq[Turn]]

    @property
    def is_recorded(self) -> bool:
        return any(turn.answer is not None for stream in self.streams for turn in stream)

    def at(self, num_streams: int) -> Workload:
        """Return the workload of so many streams.

        It is a part of this one, but the whole of a recording, whose sessions are dealt out so that all streams have
        about as much text.
        """
        if not self.is_recorded:
            return Workload(self.name, self.streams[:num_streams])
        sessions = sorted(enumerate(self.streams), key=lambda each: (-_num_said(each[1]), each[0]))
        dealt: list[list[int]] = [[] for _ in range(num_streams)]
        for place, _ in sessions:
            least = min(dealt, key=lambda places: sum(_num_said(self.streams[each]) for each in places))
            least.append(place)
        return Workload(
            self.name, [[turn for each in sorted(places) for turn in self.streams[each]] for places in dealt]
        )


def _num_said(turns: Seq[Turn]) -> int:
    """Recorded tokens of the turns that are run."""
    return sum(len(turn.answer or ()) for turn in turns if turn.is_run)


def demo_text(model_path: Path, num_streams: int) -> Workload:
    """Continuations of Python that the demo pair was not trained on."""
    return Workload("demo text", [[Turn(tuple(prompt))] for prompt in held_out_prompts(model_path, num_streams)])


def questions(model_path: Path, path: Path, num_streams: int, max_prompt_tokens: int) -> Workload:
    """First turns of Spec-Bench or MT-bench questions, evenly over the file so that every category is asked."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = [lines[index * len(lines) // num_streams] for index in range(num_streams)]
    prompts = [_encode(tokenizer, line["turns"][0])[:max_prompt_tokens] for line in chosen]
    return Workload("questions", [[Turn(prompt)] for prompt in prompts])


def agent_sessions(model_path: Path, path: Path, every: int, max_tokens: int) -> Workload:
    """Return the sessions of an agent, a stream each, with the recorded answers.

    Of all calls, session after session, one in `every` is run, whole: early, middle and late ones as often as there
    are. All others are history, and so are those of more than `max_tokens`, prompt and answer. Raises ValueError where
    none is left to run.
    """
    sessions: dict[str, list[Turn]] = {}
    for name, turn in recorded_turns(model_path, path):
        sessions.setdefault(name, []).append(turn)
    places = count()
    streams = [
        [replace(turn, is_run=next(places) % every == every // 2 and _num_tokens(turn) <= max_tokens) for turn in turns]
        for turns in sessions.values()
    ]
    if not any(_num_said(stream) for stream in streams):
        raise ValueError(f"{path}: no call is run of one in {every} with {max_tokens} tokens at most; change the two")
    return Workload("agent sessions", streams)


def _num_tokens(turn: Turn) -> int:
    return len(turn.prompt) + len(turn.answer or ())


def recorded_turns(model_path: Path, path: Path) -> list[tuple[str, Turn]]:
    """Return the calls of a trace in order of time, each with the name of its session."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    calls = sorted(read_lines(path), key=lambda call: int(call["timestamp"]))
    return [
        (call["session_id"], Turn(_encode(tokenizer, call["input"]), _encode(tokenizer, call["output"])))
        for call in calls
    ]


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

"""What the methods are tried on: streams of turns, from the demo's own files or from files given by path."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.prompts import held_out_prompts
from bench.simulator.trace_file import read_lines


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, and the answer that was recorded for it where the workload is a recording."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` run at once; the turns of a stream one after the other.

    With recorded answers the target computes its passes and then says what was recorded: that is how a small model
    stands in for the one that the text came from. Such a text has no temperature, so it is run greedily alone.
    """

    name: str
    streams: Seq[Seq[Turn]]

    @property
    def is_recorded(self) -> bool:
        return any(turn.answer is not None for stream in self.streams for turn in stream)


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


def agent_sessions(
    model_path: Path, path: Path, num_streams: int, max_prompt_tokens: int, num_turns: int, num_tokens: int
) -> Workload:
    """Sessions of an agent, call after call with the recorded answers.

    A session ends with its first call above `max_prompt_tokens`; those with most calls below it come first. Answers are
    cut after `num_tokens`.
    """
    sessions: dict[str, list[Turn]] = {}
    ended: set[str] = set()
    for name, turn in recorded_turns(model_path, path):
        ended |= {name} if len(turn.prompt) > max_prompt_tokens else set()
        if name not in ended and turn.answer:
            sessions.setdefault(name, []).append(Turn(turn.prompt, turn.answer[:num_tokens]))
    longest = sorted(sessions.values(), key=len, reverse=True)[:num_streams]
    if len(longest) < num_streams:
        raise ValueError(f"{path}: {len(longest)} sessions begin within {max_prompt_tokens} tokens, not {num_streams}")
    return Workload("agent sessions", [session[:num_turns] for session in longest])


def recorded_turns(model_path: Path, path: Path) -> list[tuple[str, Turn]]:
    """The calls of a trace in order of time, each with the name of its session."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    calls = sorted(read_lines(path), key=lambda call: int(call["timestamp"]))
    return [
        (call["session_id"], Turn(_encode(tokenizer, call["input"]), _encode(tokenizer, call["output"])))
        for call in calls
    ]


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

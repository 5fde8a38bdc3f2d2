"""The texts of the suite, and a run of them on an engine."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer

from bench.contenders.prompts import held_out_prompts, recorded_calls
from bench.speculation.recorded_engine import RecordedEngine
from protos.messages import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, and in a recording its answer.

    A turn that is not run is history: the proposer has seen it, the target has not.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None = None
    is_run: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """Streams that run at once; the turns of a stream run one after the other.

    With recorded answers the target computes its passes and then gives the recorded answer, so that a small model can
    replace the model that wrote the text. A recording is run greedily.
    """

    name: str
    streams: Seq[Seq[Turn]]

    @property
    def is_recorded(self) -> bool:
        return any(turn.answer is not None for stream in self.streams for turn in stream)

    def at(self, num_streams: int) -> Workload:
        """Return the first streams; of a recording all sessions, dealt out so that streams have about equal text."""
        if not self.is_recorded:
            return Workload(self.name, self.streams[:num_streams])
        sessions = sorted(enumerate(self.streams), key=lambda each: (-_num_recorded(each[1]), each[0]))
        dealt: list[list[int]] = [[] for _ in range(num_streams)]
        for place, _ in sessions:
            least = min(dealt, key=lambda places: sum(_num_recorded(self.streams[each]) for each in places))
            least.append(place)
        return Workload(
            self.name, [[turn for each in sorted(places) for turn in self.streams[each]] for places in dealt]
        )


def _num_recorded(turns: Seq[Turn]) -> int:
    """Return the recorded tokens of the turns that are run."""
    return sum(len(turn.answer or ()) for turn in turns if turn.is_run)


def demo_text(model_path: Path, num_streams: int) -> Workload:
    """Return prompts of Python that the demo pair was not trained on."""
    return Workload("demo text", [[Turn(tuple(prompt))] for prompt in held_out_prompts(model_path, num_streams)])


def questions(model_path: Path, path: Path, num_streams: int, max_prompt_tokens: int) -> Workload:
    """Return first turns of Spec-Bench or MT-bench questions, evenly over the file to cover every category."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = [lines[index * len(lines) // num_streams] for index in range(num_streams)]
    prompts = [_encode(tokenizer, line["turns"][0])[:max_prompt_tokens] for line in chosen]
    return Workload("questions", [[Turn(prompt)] for prompt in prompts])


def agent_sessions(model_path: Path, path: Path, every: int, max_tokens: int) -> Workload:
    """Return the sessions of an agent, a stream each, with the recorded answers.

    One in `every` calls, counted session after session, is run. The others are history, as are calls of more than
    `max_tokens`, prompt and answer together. Raises ValueError if no call is run.
    """
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    sessions: dict[str, list[Turn]] = {}
    for call in recorded_calls(path):
        turn = Turn(_encode(tokenizer, call["input"]), _encode(tokenizer, call["output"]))
        sessions.setdefault(call["session_id"], []).append(turn)
    places = count()
    streams = [
        [replace(turn, is_run=next(places) % every == every // 2 and _num_tokens(turn) <= max_tokens) for turn in turns]
        for turns in sessions.values()
    ]
    if not any(_num_recorded(stream) for stream in streams):
        raise ValueError(f"{path}: no call is run of one in {every} with {max_tokens} tokens at most; change the two")
    return Workload("agent sessions", streams)


def _num_tokens(turn: Turn) -> int:
    return len(turn.prompt) + len(turn.answer or ())


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of a run.

    `accepted_by_position[i]` is the share of passes with drafts that accepted more than i of them.
    """

    num_tokens: int
    num_passes: int  # per sequence: a batch of 8 that decodes once counts 8
    seconds: float
    accepted_by_position: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes


class WorkloadRun:
    """A run of a workload's streams on an engine: each turn begins when its predecessor has ended."""

    def __init__(
        self, engine: RecordedEngine, workload: Workload, num_tokens: int | None, sampling: SamplingParams
    ) -> None:
        """Prepare a run of all streams with one `sampling`, except for seeds and lengths.

        A turn generates at most `num_tokens`; None generates the whole of a recorded answer.
        """
        self._engine = engine
        self._num_tokens = num_tokens
        self._sampling = sampling
        self._waiting = [deque(stream) for stream in workload.streams]
        self._num_turns = 0
        self._answers: dict[str, Seq[int]] = {}
        self._history_s = 0.0

    def measure(self, before_step: Callable[[], None]) -> RunFigures:
        """Run to the end; `before_step` is called before each pass. The clock stops while history is remembered."""
        core = self._engine.core
        self._engine.verifier.answers = self._answers
        before = core.stats().drafts
        num_tokens, num_passes = 0, 0
        began_s = time.perf_counter()
        for index in range(len(self._waiting)):
            self._add_turn(index)
        while core.has_work:
            before_step()
            for chunk in core.step():
                num_tokens += len(chunk.token_ids)
                num_passes += 1
                if chunk.finish_reason is not None:
                    self._add_turn(int(chunk.request_id.split("/")[0]))
        seconds = time.perf_counter() - began_s - self._history_s
        after = core.stats().drafts
        num_drafted = after.num_drafts - before.num_drafts
        earlier = (*before.num_accepted_tokens_per_pos, *[0] * len(after.num_accepted_tokens_per_pos))
        accepted = [now - then for now, then in zip(after.num_accepted_tokens_per_pos, earlier, strict=False)]
        return RunFigures(num_tokens, num_passes, seconds, tuple(count / max(1, num_drafted) for count in accepted))

    def _add_turn(self, index: int) -> None:
        """Remember the history before the next turn that is run, and add that turn."""
        waiting = self._waiting[index]
        began_s = time.perf_counter()
        while waiting and not waiting[0].is_run:
            turn = waiting.popleft()
            self._engine.remember(self._request(index, turn), turn.answer or ())
        self._history_s += time.perf_counter() - began_s
        if waiting:
            turn = waiting.popleft()
            request = self._request(index, turn)
            if turn.answer is not None:
                self._answers[request.request_id] = turn.answer
            self._engine.core.add(request)

    def _request(self, index: int, turn: Turn) -> GenerateRequest:
        self._num_turns += 1
        lengths = (self._num_tokens, None if turn.answer is None else len(turn.answer))
        max_tokens = min(length for length in lengths if length is not None)
        # All runs share a salt: prompts are prefilled once, and the clock measures decoding.
        sampling = replace(self._sampling, max_tokens=max_tokens, seed=index)
        return GenerateRequest(f"{index}/{self._num_turns}", turn.prompt, sampling)

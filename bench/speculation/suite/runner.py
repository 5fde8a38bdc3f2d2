"""One run of a workload on an engine, and what it showed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from bench.speculation.suite.recorded_engine import RecordedEngine
from bench.speculation.suite.workload import Turn, Workload
from protos.messages import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Measured:
    """`accepted_by_position[i]` is the share of passes with drafts in which more than i of them stood."""

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


class Run:
    """A run of a workload's streams on an engine: each turn begins when the one before it has ended."""

    def __init__(
        self, engine: RecordedEngine, workload: Workload, num_tokens: int | None, sampling: SamplingParams
    ) -> None:
        """Prepare a run of all streams with one `sampling`, but for their seeds and lengths.

        A stream generates at most `num_tokens`, and all of a recording for None.
        """
        self._engine = engine
        self._num_tokens = num_tokens
        self._sampling = sampling
        self._waiting = [deque(stream) for stream in workload.streams]
        self._num_turns = 0
        self._answers: dict[str, Seq[int]] = {}
        self._history_s = 0.0

    def measure(self, before_step: Callable[[], None]) -> Measured:
        """Run to the end. `before_step` is called before each pass, as the owner of an engine may have to.

        The clock stands still while history is told.
        """
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
        stood = [now - then for now, then in zip(after.num_accepted_tokens_per_pos, earlier, strict=False)]
        return Measured(num_tokens, num_passes, seconds, tuple(count / max(1, num_drafted) for count in stood))

    def _add_turn(self, index: int) -> None:
        """The next turn of a stream that is run, and the history before it."""
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
        # The same salt for all runs: prompts are read once, and what is timed is decoding.
        sampling = replace(self._sampling, max_tokens=max_tokens, seed=index)
        return GenerateRequest(f"{index}/{self._num_turns}", turn.prompt, sampling)

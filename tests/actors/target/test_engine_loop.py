"""The loop's progress: seconds without output while the engine has work, and the times of reports."""

from __future__ import annotations

import pytest

from actors.shell_messages import Add
from actors.target.engine_loop import EngineLoop
from engine.accounting.engine_stats import DraftStats, EngineStats
from engine.accounting.step_times import StepTimes
from protos.messages import FinishReason, GenerateRequest, TokenChunk

STEP_S = 10.0


class Script:
    """A scripted engine: per step, the prompt tokens still waiting, and whether it returns a chunk."""

    def __init__(self, steps: list[tuple[int, bool]], step_s: float = STEP_S) -> None:
        self._steps = steps
        self._step_s = step_s
        self._num_queued = 100
        self.now_s = 0.0
        self.stalled_s: list[float] = []
        self.reported_s: list[float] = []
        self.loop = EngineLoop(self, lambda output: None, clock=lambda: self.now_s)

    is_starved = False

    @property
    def has_work(self) -> bool:
        return True

    def step(self) -> list[TokenChunk]:
        self.now_s += self._step_s
        self.stalled_s.append(self.loop.stalled_s)
        self._num_queued, brings = self._steps.pop(0)
        if not self._steps:
            self.loop.close()
        return [TokenChunk("a", (1,))] if brings else []

    def stats(self) -> EngineStats:
        self.reported_s.append(self.now_s)
        return EngineStats(1, 0, self._num_queued, 0, 8, 0, 0, 0, 0, DraftStats(), StepTimes())

    def prepare(self, request: GenerateRequest) -> None: ...

    def add(self, request: GenerateRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("steps", "stalled_s"),
    [
        ([(100, False)] * 4, [10, 20, 30, 40]),  # steps end, and nothing comes of them
        ([(100, True)] * 4, [10, 10, 10, 10]),
        ([(90, False), (80, False), (70, False), (70, False), (70, False)], [10, 10, 10, 10, 20]),  # a long prompt
        ([(100, False), (100, True), (100, False), (100, False)], [10, 20, 10, 20]),
    ],
)
def test_seconds_without_progress(steps: list[tuple[int, bool]], stalled_s: list[float]) -> None:
    engine = Script(list(steps))
    engine.loop.run()
    assert engine.stalled_s == stalled_s


def test_a_thread_that_is_stuck_between_steps_is_seen() -> None:
    """A loop that is stuck there has no work, and would pass for idle."""
    now_s, seen_s = 0.0, []

    class Stuck(Script):
        has_work = False

        def add(self, request: GenerateRequest) -> None:
            nonlocal now_s
            seen_s.append(loop.stalled_s)
            now_s += 300.0
            seen_s.append(loop.stalled_s)
            loop.close()

    loop = EngineLoop(Stuck([]), lambda output: None, clock=lambda: now_s)
    assert loop.stalled_s == 0.0
    loop.submit(Add(GenerateRequest("a", (1,))))
    loop.run()
    assert seen_s == [0.0, 300.0]


def test_short_steps_share_a_report() -> None:
    engine = Script([(100, True)] * 100, step_s=0.004)
    engine.loop.run()
    assert engine.reported_s == pytest.approx([0.0, 0.0, *(0.052 * number for number in range(1, 8))])


class Ending(Script):
    """An engine whose work ends with its script; the loop is closed while it waits for more."""

    @property
    def has_work(self) -> bool:
        if not self._steps and len(self.reported_s) > 2:
            self.loop.close()
        return bool(self._steps)

    def step(self) -> list[TokenChunk]:
        self.now_s += self._step_s
        self._steps.pop(0)
        return []


def test_the_last_step_is_reported_before_the_engine_waits() -> None:
    engine = Ending([(100, True)] * 3, step_s=0.004)
    engine.loop.run()
    assert engine.reported_s == pytest.approx([0.0, 0.0, 0.012])


def test_an_answer_is_in_the_numbers_before_it_leaves() -> None:
    """A client that scrapes metrics after its answer finds it counted, even after a short request."""
    order: list[str] = []

    class Answering(Script):
        def step(self) -> list[TokenChunk]:
            super().step()
            return [TokenChunk("a", (1,), finish_reason=FinishReason.LENGTH if not self._steps else None)]

        def stats(self) -> EngineStats:
            order.append(f"stats of {len(self._steps)}")
            return super().stats()

    engine = Answering([(100, True)] * 3, step_s=0.004)
    engine.loop = EngineLoop(engine, lambda output: order.append("chunk"), clock=lambda: engine.now_s)
    engine.loop.run()
    assert order[-4:] == ["chunk", "chunk", "stats of 0", "chunk"]

"""Measures each class's speedup by speculation while it serves, and switches drafts off if they gain too little.

The baseline is the time of the same steps without the class's drafts: the step's time, minus the cost of its drafts'
rows and its share of the wait for drafts. The costs come from a profile that plain passes keep up to date.

Each gate is for batches of about one size: a row that is free for a single stream costs time in a batch of sixteen. The
gate closes if drafts lose time, and tries them again after pauses that double, until a trial's loss is a small share
of the pause. Longer pauses would miss the repeating texts among others (SmolLM2, suffixes).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from engine.accounting.cost_model import CostModel, size_class
from engine.accounting.record import PassParts, PassRecord
from protos.backoff import Backoff

logger = logging.getLogger(__name__)

_FADE = 0.995  # per step: a few hundred recent steps count
_MIN_PASSES = 64.0  # passes of a class's sequences before a measurement is used
_MIN_STEPS = 16  # in a trial
_TRIAL_SHARE = 0.01  # of the time is lost in trials, once pauses are that long
_PAUSES = (64, 4096)  # steps of the first and of the longest pause; they double with every trial that fails
_MAX_SURPRISE = 1.5  # times the expected seconds: the most that one slow pass may cost a class
_GAIN = 1.05  # below this speedup the log advises against these drafts


@dataclass(frozen=True, slots=True)
class ClassStep:
    """One class's part of a step: sequences, committed tokens, and the step's time with and without its drafts.

    It represents `num_steps` equal steps. `catch_up_s` is the wait beyond what such drafts usually take.
    """

    num_sequences: int
    num_tokens: int
    seconds: float
    plain_seconds: float
    num_steps: int = 1
    catch_up_s: float = 0.0

    @property
    def num_lost_steps(self) -> float:
        """The plain steps that the class has lost by its drafts; negative for a gain."""
        step = (self.seconds + self.catch_up_s) / self.plain_seconds - self.num_tokens / self.num_sequences
        return self.num_steps * step


class SpeedupMeter:
    """Tokens per second of one class relative to plain decoding, over recent steps, with plain steps and probes."""

    def __init__(self) -> None:
        self._passes = 0.0  # all four are decayed sums over steps; seconds are multiplied by the sequences
        self._tokens = 0.0
        self._seconds = 0.0
        self._plain_seconds = 0.0

    @property
    def is_measured(self) -> bool:
        return self._passes >= _MIN_PASSES

    @property
    def speedup(self) -> float:
        """The ratio; 1 before anything is measured."""
        if self._passes == 0:
            return 1.0
        return self._tokens / self._passes * self._plain_seconds / self._seconds

    def observe(self, step: ClassStep) -> None:
        """Record one step."""
        fade, weight = _FADE**step.num_steps, step.num_steps * step.num_sequences
        self._passes = fade * self._passes + weight
        self._tokens = fade * self._tokens + step.num_steps * step.num_tokens
        self._seconds = fade * self._seconds + weight * step.seconds
        self._plain_seconds = fade * self._plain_seconds + weight * step.plain_seconds


class SpeculationGate:
    """Closes while a class loses time by drafts in batches of a size; reopens for trials.

    Args:
        name: The name of the class in the log.
    """

    def __init__(self, name: str) -> None:
        self.meter = SpeedupMeter()
        self._name = name
        self._num_steps = 0
        self._trials: dict[int, _Trial] = {}  # by class of batch sizes

    def is_open(self, batch_size: int) -> bool:
        """False while the class gets no drafts in batches of this size."""
        return self._trial(batch_size).num_steps_closed == 0

    def observe(self, step: ClassStep, batch_size: int, *, is_drafting: bool) -> None:
        """Record one step of the class; `is_drafting` if it asked for drafts."""
        self.meter.observe(step)
        self._report(step.num_steps)
        trial = self._trial(batch_size)
        if trial.num_steps_closed > 0:
            trial.num_steps_closed = max(0, trial.num_steps_closed - step.num_steps)
        elif is_drafting and (speedup := trial.evaluate(step)) is not None:
            logger.info(
                "speculation of %s gains nothing in batches of about %d: speedup=%.2f, off for %d steps",
                self._name,
                batch_size,
                speedup,
                trial.num_steps_closed,
            )

    def _trial(self, batch_size: int) -> _Trial:
        number = size_class(batch_size)
        if number not in self._trials:
            self._trials[number] = _Trial()
        return self._trials[number]

    def _report(self, num_steps: int) -> None:
        """Log the class's speedup once, when its lengths have settled."""
        before, self._num_steps = self._num_steps, self._num_steps + num_steps
        if before < 256 <= self._num_steps:
            speedup = self.meter.speedup
            advice = "" if speedup >= _GAIN else ": these drafts do not pay here, choose another draft.kind or none"
            logger.info("speculation of %s: speedup=%.2f over plain decoding%s", self._name, speedup, advice)


class _Trial:
    """The speedup of steps with drafts since the last pause, and the steps left of a pause."""

    def __init__(self) -> None:
        self.num_steps_closed = 0
        self._backoff = Backoff(*_PAUSES)
        self._begin()

    def _begin(self) -> None:
        self._meter = SpeedupMeter()
        self._num_steps, self._num_lost = 0, 0.0

    def evaluate(self, step: ClassStep) -> float | None:
        """Record a step. If the steps have lost time, begin a pause and return their speedup."""
        self._meter.observe(step)
        self._num_steps += 1
        self._num_lost += step.num_lost_steps
        if not self._meter.is_measured or self._num_steps < _MIN_STEPS:
            return None
        if (speedup := self._meter.speedup) >= 1.0:
            self._backoff.reset()
            return None
        self.num_steps_closed = int(min(self._backoff.next(), max(_PAUSES[0], self._num_lost / _TRIAL_SHARE)))
        self._begin()
        return speedup


class SpeculationGates:
    """One gate per class of requests.

    Args:
        costs: the seconds of passes and drafts, which divide the time of a pass among the classes.

    Attributes:
        batch_size: sequences of the pass that `is_open` is about.
        planning_s: the seconds of plans per step, recently; classes with drafts pay the median.
    """

    def __init__(self, costs: CostModel) -> None:
        self.batch_size = 1
        self.planning_s = deque([0.0], maxlen=9)
        self._costs = costs
        self._gates: dict[str, SpeculationGate] = {}

    @property
    def speedups(self) -> dict[str, float]:
        """Measured tokens per second relative to plain decoding, by class."""
        return {name: gate.meter.speedup for name, gate in self._gates.items()}

    def goodput(self, name: str) -> float | None:
        """Return the speedup of a class; None until it is measured."""
        gate = self._gates.get(name)
        return gate.meter.speedup if gate is not None and gate.meter.is_measured else None

    def forget_drafts(self) -> None:
        """Forget all measurements, since other models draft now."""
        self._gates = {}

    def is_open(self, name: str) -> bool:
        """False while the class gets no drafts in batches of this size."""
        return self._gate(name).is_open(self.batch_size)

    def observe(self, record: PassRecord, parts: PassParts, num_steps: int = 1, *, is_speculating: bool) -> None:
        """Divide a pass, which represents `num_steps`, between the classes, and measure the speedup of each."""
        drafts, waited_s = self._costs.drafts, record.times.draft_s
        expected_s, shares = drafts.seconds(parts.requested), drafts.shares(parts.requested)
        draft_s = min(waited_s, _MAX_SURPRISE * expected_s) if expected_s > 0.0 else waited_s
        planning_s = sorted(self.planning_s)[len(self.planning_s) // 2]
        for name, part in parts.classes.items():
            share = sum(
                [rows / parts.requested[each].num_tokens * shares[each] for each, rows in part.num_requested.items()]
            )
            # The target's time without the class's drafts is estimated by the ratio of the costs.
            whole_s, added, fewer = self._costs.split(record.num_prompt_rows, parts.num_rows, part.num_proposed)
            target_s = added * min(record.times.target_s, _MAX_SURPRISE * whole_s)
            step = ClassStep(
                num_sequences=part.num_sequences,
                num_tokens=part.num_tokens,
                seconds=target_s + draft_s + share * planning_s,
                plain_seconds=target_s * fewer + (1.0 - share) * draft_s,
                num_steps=num_steps,
                catch_up_s=share * (waited_s - draft_s),
            )
            is_drafting = is_speculating and bool(part.num_requested)
            self._gate(name).observe(step, parts.num_sequences, is_drafting=is_drafting)

    def _gate(self, name: str) -> SpeculationGate:
        if name not in self._gates:
            self._gates[name] = SpeculationGate(name)
        return self._gates[name]

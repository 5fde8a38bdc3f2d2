"""The speedup of each class of requests by speculation, measured while it serves, and a gate where there is hardly any.

The baseline is what the same steps would have taken without the class's drafts: the step's own time, less what its
drafts' rows and its share of the waiting cost, by a profile that plain passes keep honest.

A gate belongs to batches of about one size: rows that a stream alone has for nothing cost sixteen of them their share.
It closes where drafts do not gain enough to be felt, for even then they make passes longer and uneven.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from protos.backoff import Backoff

logger = logging.getLogger(__name__)

_FADE = 0.995  # per step: the last few hundred count
_MIN_PASSES = 64.0  # of a class's sequences, before a measurement is believed
_MIN_STEPS = 16  # of a trial
_WORTH = 1.03  # below, the gate closes
_FIRST_PAUSE = 64  # steps; doubles with every trial that fails
_LONGEST_PAUSE = 4096
_REPORTED_STEP = 256  # at which a class's speedup is said once
_GAIN = 1.05  # below, it is said that drafts do not pay


@dataclass(frozen=True, slots=True)
class ClassStep:
    """One class's part of one step: its sequences, what they committed, and the step's time with and without drafts."""

    num_sequences: int
    num_tokens: int
    seconds: float
    plain_seconds: float


class SpeedupMeter:
    """Tokens per second of one class against no speculation, over recent steps, plain ones and probes included."""

    def __init__(self) -> None:
        self._passes = 0.0  # decayed sums over steps: of sequences, of tokens, and of seconds times sequences
        self._tokens = 0.0
        self._seconds = 0.0
        self._plain_seconds = 0.0

    @property
    def is_measured(self) -> bool:
        return self._passes >= _MIN_PASSES

    @property
    def speedup(self) -> float:
        """The ratio; 1 until something is measured."""
        if self._passes == 0:
            return 1.0
        return self._tokens / self._passes * self._plain_seconds / self._seconds

    def observe(self, step: ClassStep) -> None:
        """Take in one step."""
        self._passes = _FADE * self._passes + step.num_sequences
        self._tokens = _FADE * self._tokens + step.num_tokens
        self._seconds = _FADE * self._seconds + step.num_sequences * step.seconds
        self._plain_seconds = _FADE * self._plain_seconds + step.num_sequences * step.plain_seconds


class SpeculationGate:
    """Closed where a class gains too little in batches of a size; open again for a trial after ever longer pauses.

    Args:
        name: the class's in the log.
    """

    def __init__(self, name: str) -> None:
        self.meter = SpeedupMeter()
        self._name = name
        self._num_steps = 0
        self._trials: dict[int, _Trial] = {}  # by the bits of the batch's size

    def is_open(self, batch_size: int) -> bool:
        """False while the class has no drafts in batches of so many sequences."""
        return self._trial(batch_size).num_steps_closed == 0

    def observe(self, step: ClassStep, batch_size: int, *, is_drafting: bool) -> None:
        """Take in one step of the class in a batch of so many sequences, with drafts asked for or without."""
        self.meter.observe(step)
        self._report()
        trial = self._trial(batch_size)
        if trial.num_steps_closed > 0:
            trial.num_steps_closed -= 1
        elif is_drafting and (speedup := trial.judge(step)) is not None:
            logger.info(
                "speculation of %s gains too little in batches of about %d: speedup=%.2f, off for %d steps",
                self._name,
                batch_size,
                speedup,
                trial.num_steps_closed,
            )

    def _trial(self, batch_size: int) -> _Trial:
        return self._trials.setdefault(batch_size.bit_length(), _Trial())

    def _report(self) -> None:
        """Say once how the class fares, when its lengths have settled."""
        self._num_steps += 1
        if self._num_steps == _REPORTED_STEP:
            speedup = self.meter.speedup
            verdict = "" if speedup >= _GAIN else ": these drafts do not pay here, choose another draft.kind or none"
            logger.info("speculation of %s: speedup=%.2f over plain decoding%s", self._name, speedup, verdict)


class _Trial:
    """The speedup of the steps with drafts since the last pause, and what is left of a pause."""

    def __init__(self) -> None:
        self.num_steps_closed = 0
        self._meter = SpeedupMeter()
        self._num_steps = 0
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)

    def judge(self, step: ClassStep) -> float | None:
        """Take in a step, and begin a pause if the speedup is known to be too little: return it then."""
        self._meter.observe(step)
        self._num_steps += 1
        if not self._meter.is_measured or self._num_steps < _MIN_STEPS:
            return None
        speedup = self._meter.speedup
        if speedup >= _WORTH:
            self._backoff.reset()
            return None
        self.num_steps_closed = int(self._backoff.next())
        self._meter, self._num_steps = SpeedupMeter(), 0
        return speedup

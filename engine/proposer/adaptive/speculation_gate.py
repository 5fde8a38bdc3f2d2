"""The speedup of each class of requests by speculation, measured while it serves, and a gate for those it slows.

The baseline is what the same steps would have taken without the class's drafts: the step's own time, less what its
drafts' rows and its share of the waiting cost, by a profile that plain passes keep honest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from protos.backoff import Backoff

logger = logging.getLogger(__name__)

_FADE = 0.995  # per step: the last few hundred count
_MIN_PASSES = 64.0  # of a class's sequences, before a measurement is believed
_LOSS = 0.97  # below, the gate closes
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
    """Closed for a class that loses by drafts; open again for a trial after ever longer pauses."""

    def __init__(self, name: str) -> None:
        """`name` is the class's in the log."""
        self.meter = SpeedupMeter()
        self._name = name
        self._num_steps = 0
        self._trial = SpeedupMeter()
        self._num_steps_closed = 0
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)

    @property
    def is_open(self) -> bool:
        return self._num_steps_closed == 0

    def observe(self, step: ClassStep) -> None:
        """Take in one step of the class and decide."""
        self.meter.observe(step)
        self._report()
        if not self.is_open:
            self._num_steps_closed -= 1
            return
        self._trial.observe(step)
        if not self._trial.is_measured:
            return
        if self._trial.speedup < _LOSS:
            self._num_steps_closed = int(self._backoff.next())
            logger.info(
                "speculation of %s loses: speedup=%.2f, off for %d steps",
                self._name,
                self._trial.speedup,
                self._num_steps_closed,
            )
            self._trial = SpeedupMeter()
        elif self._trial.speedup >= 1.0:
            self._backoff.reset()

    def _report(self) -> None:
        """Say once how the class fares, when its lengths have settled."""
        self._num_steps += 1
        if self._num_steps == _REPORTED_STEP:
            speedup = self.meter.speedup
            verdict = "" if speedup >= _GAIN else ": these drafts do not pay here, choose another draft.kind or none"
            logger.info("speculation of %s: speedup=%.2f over plain decoding%s", self._name, speedup, verdict)

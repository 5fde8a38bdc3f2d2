"""Sequential detection of a fall of acceptance, per class of requests, on the drafts of the first position.

The first position is the same whatever K is. Two rates of passes that count less with every step, one of the last
seventy steps for large falls and one of the last thousand for small ones, are held against a reference that learns
slowly: the alarm rings when either is more than `THRESHOLD` standard errors below. Where few passes run at once the
slower ones last longer, for evidence is passes. The reference is as many passes behind as the slower rate has, so that
a fall is held against what came before it. The error is that of both rates, of a binomial times an overdispersion that
is measured on the same traffic, since passes of one text fare alike. Threshold and overdispersion are set by simulated
run lengths (`bench.speculation.drift`, docs/watch.md).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

logger = logging.getLogger(__name__)

THRESHOLD = 6.0  # standard errors
_CLEAR = 2.0  # standard errors below the reference at which an alarm ends
# Steps that count, and the passes that these have at least.
_RECENT_LENGTHS = ((67.0, 0.0), (1000.0, 5000.0))
_REFERENCE_LENGTH = (5000.0, 40_000.0)  # without those of an alarm
# The reference learns of steps only when so many are behind them: a fall must not become what it is held against.
_LAG_STEPS, _LAG_PASSES = 1000, 5000
_WINDOW_STEPS = 100  # whose spread against each other measures the overdispersion
_PRIOR_SPREAD = 6.0  # times the binomial variance, until windows say otherwise
_NUM_PRIOR_WINDOWS = 5  # that the prior is worth
_MAX_SURPRISE = 4.0  # times the usual: what one window counts as at most
_MIN_WINDOWS = 15  # before a reference is believed
_MIN_PASSES = 500.0
_MIN_RECENT = 20.0  # effective passes
_LEAST_RATE = 0.02  # a rate nearer to 0 or 1 has an error that says nothing
_MAX_ALARM_STEPS = 20_000  # after so many at a new level, it is the reference


@dataclass(frozen=True, slots=True)
class DriftStats:
    """One class's state: the rates, the alarms so far, and whether one rings now."""

    name: str
    recent: float
    reference: float
    num_alarms: int
    is_alarming: bool


class _Rate:
    """A decayed rate, and how many independent passes it is worth."""

    def __init__(self, num_steps: float, num_passes: float) -> None:
        """The last `num_steps` count, or more of them, so that `num_passes` do."""
        self._num_steps, self._num_passes = num_steps, num_passes
        self._hits = self.weight = self._squares = 0.0

    def observe(self, num_passes: int, num_accepted: int, num_steps: int = 1) -> None:
        decay = math.exp(-num_steps / max(self._num_steps, self._num_passes * num_steps / max(num_passes, 1)))
        self._hits = decay * self._hits + num_accepted
        self.weight = decay * self.weight + num_passes
        self._squares = decay**2 * self._squares + num_passes

    @property
    def value(self) -> float:
        return self._hits / self.weight if self.weight else 0.0

    @property
    def effective(self) -> float:
        return self.weight**2 / self._squares if self._squares else 0.0


class _Window(NamedTuple):
    """The passes of some steps."""

    num_steps: int
    num_passes: int
    num_accepted: int

    def and_step(self, num_passes: int, num_accepted: int) -> _Window:
        return _Window(self.num_steps + 1, self.num_passes + num_passes, self.num_accepted + num_accepted)


def _is_lag(windows: Sequence[_Window]) -> bool:
    """Return True if these are as many steps as the reference is behind."""
    return (
        sum(each.num_steps for each in windows) >= _LAG_STEPS
        and sum(each.num_passes for each in windows) >= _LAG_PASSES
    )


class DriftDetector:
    """The detector of one class; `observe` takes the steps in which the class had drafts."""

    is_alarming: bool
    _num_alarm_steps: int
    _rang: int
    _recent: list[_Rate]

    def __init__(self) -> None:
        self.num_alarms = 0
        self._start_over()

    @property
    def recent(self) -> float:
        """Acceptance at the first position, over the last steps: of the rate that rang while there is an alarm."""
        return self._recent[self._rang].value

    @property
    def reference(self) -> float:
        """Acceptance at the first position that is usual."""
        return self._reference.value

    def observe(self, num_passes: int, num_accepted: int) -> bool:
        """Take in one step; true if an alarm begins with it."""
        for rate in self._recent:
            rate.observe(num_passes, num_accepted)
        if not self.is_alarming:
            self._observe_window(num_passes, num_accepted)
        if self.is_alarming:
            self._num_alarm_steps += 1
            if self._num_alarm_steps > _MAX_ALARM_STEPS:
                self._start_over()
            elif self._errors_below(self._recent[self._rang]) <= _CLEAR:
                self._end_alarm()
            return False
        errors = [self._errors_below(rate) for rate in self._recent]
        if max(errors) > THRESHOLD:
            self.is_alarming, self._rang = True, errors.index(max(errors))
            self.num_alarms += 1
        return self.is_alarming

    def _start_over(self) -> None:
        self._end_alarm()
        self._reference = _Rate(*_REFERENCE_LENGTH)
        self._spread = _PRIOR_SPREAD
        self._num_windows = 0

    def _end_alarm(self) -> None:
        """Forget the steps of an alarm and those right before it; the reference has seen none of them."""
        self.is_alarming = False
        self._num_alarm_steps = 0
        self._rang = 0  # the index of the rate that rings
        self._recent = [_Rate(*length) for length in _RECENT_LENGTHS]
        self._window = _Window(0, 0, 0)
        self._pending: deque[_Window] = deque()

    def _observe_window(self, num_passes: int, num_accepted: int) -> None:
        self._window = self._window.and_step(num_passes, num_accepted)
        if self._window.num_steps < _WINDOW_STEPS:
            return
        self._pending.append(self._window)
        self._window = _Window(0, 0, 0)
        while _is_lag([*self._pending][1:]):
            oldest = self._pending.popleft()
            if self._reference.weight >= _MIN_PASSES:
                self._observe_spread(oldest)
            self._reference.observe(oldest.num_passes, oldest.num_accepted, oldest.num_steps)

    def _observe_spread(self, window: _Window) -> None:
        expected = self.reference
        variance = max(expected * (1 - expected), _LEAST_RATE) / window.num_passes
        self._num_windows += 1
        share = max(1 / (self._num_windows + _NUM_PRIOR_WINDOWS), 0.01)
        surprise = (window.num_accepted / window.num_passes - expected) ** 2 / variance
        if self._num_windows > _MIN_WINDOWS:  # a fall on its way must not pass for spread
            surprise = min(surprise, _MAX_SURPRISE * max(self._spread, 1.0))
        self._spread += share * (surprise - self._spread)

    def _errors_below(self, recent: _Rate) -> float:
        """Return how many standard errors a recent rate is below the reference; 0 while either is not known."""
        if self._num_windows < _MIN_WINDOWS or self._reference.weight < _MIN_PASSES:
            return 0.0
        if recent.effective < _MIN_RECENT:
            return 0.0
        expected = self.reference
        share = 1 / recent.effective + 1 / self._reference.effective
        variance = max(expected * (1 - expected), _LEAST_RATE) * max(self._spread, 1.0) * share
        return (expected - recent.value) / math.sqrt(variance)


class DriftMonitor:
    """One detector per class; `record` takes a pass, `end_step` all passes of a step together."""

    def __init__(self) -> None:
        self._detectors: dict[str, DriftDetector] = {}
        self._step: dict[str, tuple[int, int]] = {}

    def record(self, name: str, is_accepted: bool, num_passes: int = 1) -> None:
        """Take in passes with a draft at the first position; `name` must come from a fixed set."""
        passes, accepted = self._step.get(name, (0, 0))
        self._step[name] = passes + num_passes, accepted + num_passes * is_accepted

    def end_step(self) -> None:
        """Judge what the step has brought; each alarm that begins is logged."""
        for name, (num_passes, num_accepted) in self._step.items():
            detector = self._detectors.setdefault(name, DriftDetector())
            if detector.observe(num_passes, num_accepted):
                logger.warning(
                    "acceptance of %s has fallen to %.3f from %.3f at the first position: the traffic has changed, or "
                    "the draft has",
                    name,
                    detector.recent,
                    detector.reference,
                )
        self._step.clear()

    def snapshot(self) -> tuple[DriftStats, ...]:
        """Return the state of every class."""
        return tuple(
            DriftStats(name, each.recent, each.reference, each.num_alarms, each.is_alarming)
            for name, each in self._detectors.items()
        )

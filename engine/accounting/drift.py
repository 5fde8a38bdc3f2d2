"""Detects a fall of acceptance, per class of requests, from the drafts at the first position.

The first position is comparable for every K. Two decaying rates are compared with a slow reference: one over the last
seventy steps, for large falls, and one over the last thousand, for small ones. The alarm starts when either is more
than `THRESHOLD` standard errors below the reference. With few passes per step, the slower windows cover more steps, to
hold enough passes. The reference lags by the window of the slower rate, so a fall is compared with the traffic before
it. The standard error combines both rates: a binomial's, times an overdispersion measured on the same traffic, since
passes of one text are correlated. Threshold and overdispersion were set by simulated run lengths (docs/operate.md).
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
# Length of each recent window in steps, extended until it has so many passes.
_RECENT_LENGTHS = ((67.0, 0.0), (1000.0, 5000.0))
_REFERENCE_LENGTH = (5000.0, 40_000.0)  # the same for the reference; steps of an alarm do not count
_MIN_WINDOWS = 15  # windows before the reference is used
_MIN_PASSES = 500.0  # passes before the reference is used
_LEAST_RATE = 0.02  # lower bound on the variance p (1 - p), which vanishes near rates of 0 and 1


@dataclass(frozen=True, slots=True)
class DriftStats:
    """One class's state: its rates, the number of alarms so far, and whether an alarm is on."""

    name: str
    recent: float
    reference: float
    num_alarms: int
    is_alarming: bool


class _Rate:
    """An exponentially decayed rate and its effective number of passes."""

    def __init__(self, num_steps: float, num_passes: float) -> None:
        """Average over about the last `num_steps` steps, or over more steps if these have fewer than `num_passes`."""
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
    """Counts over consecutive steps."""

    num_steps: int
    num_passes: int
    num_accepted: int

    def and_step(self, num_passes: int, num_accepted: int) -> _Window:
        return _Window(self.num_steps + 1, self.num_passes + num_passes, self.num_accepted + num_accepted)


def _is_lag(windows: Sequence[_Window]) -> bool:
    """True if the windows cover the lag of the reference, so that a fall does not enter the reference."""
    return sum(each.num_steps for each in windows) >= 1000 and sum(each.num_passes for each in windows) >= 5000


class DriftDetector:
    """The detector of one class of a fixed set, by its name."""

    is_alarming: bool
    _num_alarm_steps: int
    _alarm_rate: int
    _recent: list[_Rate]

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_alarms = 0
        self._start_over()

    @property
    def stats(self) -> DriftStats:
        """The present state."""
        return DriftStats(self._name, self.recent, self.reference, self._num_alarms, self.is_alarming)

    @property
    def recent(self) -> float:
        """Recent acceptance at the first position; during an alarm, of the rate that caused it."""
        return self._recent[self._alarm_rate].value

    @property
    def reference(self) -> float:
        """Usual acceptance at the first position."""
        return self._reference.value

    def observe(self, num_passes: int, num_accepted: int) -> bool:
        """Add a step's passes with a draft at the first position. Returns True if an alarm starts, and logs it."""
        for rate in self._recent:
            rate.observe(num_passes, num_accepted)
        if not self.is_alarming:
            self._observe_window(num_passes, num_accepted)
        # During an alarm, look only for its end.
        if self.is_alarming:
            self._num_alarm_steps += 1
            if self._num_alarm_steps > 20_000:  # the new level becomes the reference
                self._start_over()
            elif self._errors_below(self._recent[self._alarm_rate]) <= 2.0:  # standard errors
                self._end_alarm()
            return False
        # Otherwise, the rate with the larger deviation decides.
        errors = [self._errors_below(rate) for rate in self._recent]
        if max(errors) > THRESHOLD:
            self.is_alarming, self._alarm_rate = True, errors.index(max(errors))
            self._num_alarms += 1
            logger.warning(
                "acceptance of %s has fallen to %.3f from %.3f at the first position: the traffic or the draft "
                "has changed",
                *(self._name, self.recent, self.reference),
            )
        return self.is_alarming

    def _start_over(self) -> None:
        self._end_alarm()
        self._reference = _Rate(*_REFERENCE_LENGTH)
        self._spread = 6.0  # overdispersion before it is measured, as a multiple of the binomial variance
        self._num_windows = 0

    def _end_alarm(self) -> None:
        """Discard the steps of an alarm and the pending ones right before it, which the reference has not seen."""
        self.is_alarming = False
        self._num_alarm_steps = 0
        self._alarm_rate = 0  # index of the rate that caused the alarm
        self._recent = [_Rate(*length) for length in _RECENT_LENGTHS]
        self._window = _Window(0, 0, 0)
        self._pending: deque[_Window] = deque()

    def _observe_window(self, num_passes: int, num_accepted: int) -> None:
        self._window = self._window.and_step(num_passes, num_accepted)
        if self._window.num_steps < 100:  # the spread of windows measures the overdispersion
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
        share = max(1 / (self._num_windows + 5), 0.01)  # the prior weighs five windows
        surprise = (window.num_accepted / window.num_passes - expected) ** 2 / variance
        if self._num_windows > _MIN_WINDOWS:  # a beginning fall must not count as spread
            # One window's variance counts at most as four times the current overdispersion.
            surprise = min(surprise, 4.0 * max(self._spread, 1.0))
        self._spread += share * (surprise - self._spread)

    def _errors_below(self, recent: _Rate) -> float:
        """Return how many standard errors a recent rate is below the reference; 0 until both are measured."""
        if self._num_windows < _MIN_WINDOWS or self._reference.weight < _MIN_PASSES:
            return 0.0
        if recent.effective < 20.0:  # too few effective passes
            return 0.0
        expected = self.reference
        share = 1 / recent.effective + 1 / self._reference.effective
        variance = max(expected * (1 - expected), _LEAST_RATE) * max(self._spread, 1.0) * share
        return (expected - recent.value) / math.sqrt(variance)

"""A sequential test of two drafts on paired log ratios of their goodput: valid whenever it is looked at.

The mean of the ratios has a confidence sequence: an interval after each pair such that, with the stated probability,
none of them ever misses it. It is the t-test martingale with a Gaussian mixture over the effect size (arXiv:2310.03722,
the test martingale in a reduced filtration), so no spread need be known beforehand, and looking after every pair costs
nothing. Its assumption, independent Gaussian ratios, is made likely by the pairs: the two blocks of one are neighbours
in time and in random order. `bench.speculation.canary` measures the error rates where the assumption does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum

_EFFECT_VARIANCE = 4.0  # of the mixture over mean / spread: gains of twice the spread are found soonest


class Verdict(StrEnum):
    """The outcome of a trial."""

    OPEN = "open"
    KEEP = "keep"  # the new draft is faster
    ROLL_BACK = "roll back"  # it gains less than the least gain, or nothing could be shown


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate of a mean, and the bounds between which it is."""

    mean: float
    low: float
    high: float


def confidence_sequence(values: Seq[float], error_rate: float) -> Interval:
    """Return the interval after these values; over all lengths it ever misses the mean with at most `error_rate`.

    With t the usual statistic of n values, g the mixture's variance and nu = n - 1, the interval holds the means for
    which (1 + n g)^(-1/2) ((1 + t^2 / nu) / (1 + t^2 / (nu (1 + n g))))^(n / 2) < 1 / error_rate.
    """
    number = len(values)
    mean = math.fsum(values) / number if number else 0.0
    if number < 2:
        return Interval(mean, -math.inf, math.inf)
    growth = 1 + number * _EFFECT_VARIANCE
    power = (math.sqrt(growth) / error_rate) ** (2 / number)
    if power >= growth:
        return Interval(mean, -math.inf, math.inf)
    squared_t = (number - 1) * (power - 1) / (1 - power / growth)
    variance = math.fsum((value - mean) ** 2 for value in values) / (number - 1)
    width = math.sqrt(squared_t * variance / number)
    return Interval(mean, mean - width, mean + width)


@dataclass(frozen=True, slots=True)
class GoodputTrial:
    """The limits of a trial.

    A draft that is not faster is kept with probability `false_keep` at most. One that gains `min_gain` (0.05: 5%) or
    more is rolled back before `max_pairs` with `false_rollback` at most; after so many pairs without a verdict it is
    rolled back.
    """

    min_gain: float = 0.05
    false_keep: float = 0.05
    false_rollback: float = 0.05
    max_pairs: int = 30

    def verdict(self, log_ratios: Seq[float]) -> Verdict:
        """Return the verdict on log ratios of new over old goodput, one per pair of blocks."""
        if self.interval(log_ratios).low > 0:
            return Verdict.KEEP
        is_over = len(log_ratios) >= self.max_pairs
        return Verdict.ROLL_BACK if is_over or self._gains_too_little(log_ratios) else Verdict.OPEN

    def reason(self, log_ratios: Seq[float]) -> str:
        """Return the reason of the verdict, in words."""
        number = len(log_ratios)
        match self.verdict(log_ratios):
            case Verdict.KEEP:
                return f"it is faster, by {number} pairs of blocks"
            case Verdict.ROLL_BACK if self._gains_too_little(log_ratios):
                return f"it gains less than {self.min_gain:.1%}, by {number} pairs of blocks"
            case Verdict.ROLL_BACK:
                return f"no gain was shown in {number} pairs of blocks"
            case _:
                return ""

    def _gains_too_little(self, log_ratios: Seq[float]) -> bool:
        return confidence_sequence(log_ratios, self.false_rollback).high < math.log1p(self.min_gain)

    def interval(self, log_ratios: Seq[float]) -> Interval:
        """Return the interval of the mean log ratio that `false_keep` allows."""
        return confidence_sequence(log_ratios, self.false_keep)

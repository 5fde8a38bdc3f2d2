"""A sequential test of two drafts on paired log ratios of their goodput: valid whenever it is looked at.

Two martingales bet against a bound of the gain, and what they have won on average is the evidence. One is the t-test's
with a Gaussian mixture over the effect size (arXiv:2310.03722, in a reduced filtration): it is quick where the ratios
are alike. The other bets on their signs alone, which are fair coins if there is no gain, for the two blocks of a pair
are neighbours in time and in random order: it is not held up by a block in which the machine did something else. No
spread need be known beforehand, and looking after every pair costs nothing. `bench.speculation.canary` measures the
error rates where the ratios are neither Gaussian nor independent.
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
    number, mean = len(values), _mean(values)
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


def evidence(values: Seq[float], bound: float) -> float:
    """Return the evidence that the mean is not `bound`, but on the side of it where the values' mean is.

    With the truth at `bound` it ever reaches 1 / rate with a probability of `rate` at most.
    """
    return (t_evidence(values, bound) + sign_evidence(values, bound)) / 2


def t_evidence(values: Seq[float], bound: float) -> float:
    """Return the value of the martingale behind `confidence_sequence`."""
    number, mean = len(values), _mean(values)
    if number < 2:
        return 1.0
    squares = math.fsum((value - mean) ** 2 for value in values)
    growth = 1 + number * _EFFECT_VARIANCE
    if squares == 0:  # the limit: few values are no proof, however alike
        return float(growth ** (-0.5 if mean == bound else (number - 1) / 2))
    share = number * (mean - bound) ** 2 / squares  # t^2 / nu
    return float(growth**-0.5 * ((1 + share) / (1 + share / growth)) ** (number / 2))


def sign_evidence(values: Seq[float], bound: float) -> float:
    """Return the value of bets on the values' signs, uniformly mixed over the probability p > 1/2 of the mean's sign.

    It is the integral of 2 p^k (1 - p)^(n - k) over that half, times 2^n, where k of n have the sign. A sum of the
    binomial distribution has it: 2^(n + 1) P(Beta(k + 1, n - k + 1) > 1/2) B(k + 1, n - k + 1).
    """
    number, is_above = len(values), _mean(values) > bound
    num_agreeing = sum((value > bound) == is_above for value in values)
    choices = sum(math.comb(number + 1, each) for each in range(num_agreeing + 1))
    return choices / (number + 1) / math.comb(number, num_agreeing)


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
    max_pairs: int = 60

    def verdict(self, log_ratios: Seq[float]) -> Verdict:
        """Return the verdict on log ratios of new over old goodput, one per pair of blocks."""
        if _mean(log_ratios) > 0 and evidence(log_ratios, 0.0) >= 1 / self.false_keep:
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
        least = math.log1p(self.min_gain)
        return _mean(log_ratios) < least and evidence(log_ratios, least) >= 1 / self.false_rollback

    def interval(self, log_ratios: Seq[float]) -> Interval:
        """Return the interval of the mean log ratio that `false_keep` allows, by the t-test alone."""
        return confidence_sequence(log_ratios, self.false_keep)


def _mean(values: Seq[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0

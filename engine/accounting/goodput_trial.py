"""A sequential test of two drafts on paired log ratios of their goodput. It is valid at any stopping time.

Two martingales bet against a bound of the gain, and the evidence is the mean of their winnings. One is the t-test's,
with a Gaussian mixture over the effect size (arXiv:2310.03722, in a reduced filtration). It is fast if the ratios vary
little. The other bets on the signs of the ratios. Without a gain they are fair coins, since the two blocks of a pair
are adjacent in time and in random order. It is robust against single blocks with a disturbed machine. The test needs no
known spread, and checking after every pair costs nothing. `tests/engine/accounting/test_goodput_trial.py` measures the
error rates for ratios that are not Gaussian and not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum

_EFFECT_VARIANCE = 4.0  # variance of the mixture over mean / spread; it favours gains of twice the spread


class Verdict(StrEnum):
    """The outcome of a trial."""

    OPEN = "open"
    KEEP = "keep"  # the new draft is faster
    ROLL_BACK = "roll back"  # it gains less than the minimum, or no gain was shown


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate of a mean, with its confidence bounds."""

    mean: float
    low: float
    high: float


def confidence_sequence(values: Seq[float], error_rate: float) -> Interval:
    """Return the interval after these values. Over all lengths, it ever misses the mean with at most `error_rate`.

    With t the usual statistic of n values, g the mixture's variance and nu = n - 1, the interval holds the means with
    (1 + n g)^(-1/2) ((1 + t^2 / nu) / (1 + t^2 / (nu (1 + n g))))^(n / 2) < 1 / error_rate.
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
    """Return the evidence that the true mean is on the same side of `bound` as the values' mean.

    If the true mean is `bound`, the evidence ever reaches 1 / rate with a probability of at most `rate`.
    """
    return (t_evidence(values, bound) + sign_evidence(values, bound)) / 2


def t_evidence(values: Seq[float], bound: float) -> float:
    """Return the value of the martingale that `confidence_sequence` inverts."""
    number, mean = len(values), _mean(values)
    if number < 2:
        return 1.0
    squares = math.fsum((value - mean) ** 2 for value in values)
    growth = 1 + number * _EFFECT_VARIANCE
    if squares == 0:  # the limit: a few equal values are no proof
        return float(growth ** (-0.5 if mean == bound else (number - 1) / 2))
    share = number * (mean - bound) ** 2 / squares  # t^2 / nu
    return float(growth**-0.5 * ((1 + share) / (1 + share / growth)) ** (number / 2))


def sign_evidence(values: Seq[float], bound: float) -> float:
    """Return the value of bets on the values' signs, mixed uniformly over the probability p > 1/2 of the mean's sign.

    If k of n values have that sign, it is 2^n times the integral of 2 p^k (1 - p)^(n - k) over p in (1/2, 1). In closed
    form: 2^(n + 1) P(Beta(k + 1, n - k + 1) > 1/2) B(k + 1, n - k + 1), a binomial sum.
    """
    number, is_above = len(values), _mean(values) > bound
    num_agreeing = sum((value > bound) == is_above for value in values)
    choices = sum(math.comb(number + 1, each) for each in range(num_agreeing + 1))
    return choices / (number + 1) / math.comb(number, num_agreeing)


@dataclass(frozen=True, slots=True)
class GoodputTrial:
    """The limits of a trial.

    A draft that is not faster is kept with a probability of at most `false_keep`. A draft that gains `min_gain` or more
    (0.05: 5%) is rolled back before `max_pairs` with a probability of at most `false_rollback`. After `max_pairs`
    without a verdict, the draft is rolled back.
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
        """Return the confidence interval of the mean log ratio at error rate `false_keep`, by the t-test alone."""
        return confidence_sequence(log_ratios, self.false_keep)


def _mean(values: Seq[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0

"""Decoding speed by the number of decoding sequences, to compare two drafts under equal load.

A sequential test of two drafts on paired log ratios of their goodput. It is valid at any stopping time.

Two martingales bet against a bound of the gain, and the evidence is the mean of their winnings. One is the t-test's,
with a Gaussian mixture over the effect size (arXiv:2310.03722, in a reduced filtration). It is fast if the ratios vary
little. The other bets on the signs of the ratios. Without a gain they are fair coins, since the two blocks of a pair
are adjacent in time and in random order. It is robust against single blocks with a disturbed machine. The test needs no
known spread, and checking after every pair costs nothing. `tests/engine/accounting/test_goodput_trial.py` measures the
error rates for ratios that are not Gaussian and not independent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protos.served_model import CanaryOutcome

if TYPE_CHECKING:  # it imports torch, which the shells that read these sums do not need
    from engine.accounting.record import PassRecord

_EFFECT_VARIANCE = 4.0  # variance of the mixture over mean / spread; it favours gains of twice the spread


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

    def verdict(self, log_ratios: Seq[float]) -> CanaryOutcome:
        """Return the verdict on log ratios of new over old goodput, one per pair of blocks."""
        if _mean(log_ratios) > 0 and evidence(log_ratios, 0.0) >= 1 / self.false_keep:
            return CanaryOutcome.KEPT
        is_over = len(log_ratios) >= self.max_pairs
        is_lost = is_over or self._gains_too_little(log_ratios)
        return CanaryOutcome.ROLLED_BACK if is_lost else CanaryOutcome.RUNNING

    def reason(self, log_ratios: Seq[float]) -> str:
        """Return the reason of the verdict, in words."""
        number = len(log_ratios)
        match self.verdict(log_ratios):
            case CanaryOutcome.KEPT:
                return f"it is faster, by {number} pairs of blocks"
            case CanaryOutcome.ROLLED_BACK if self._gains_too_little(log_ratios):
                return f"it gains less than {self.min_gain:.1%}, by {number} pairs of blocks"
            case CanaryOutcome.ROLLED_BACK:
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


PassSums = dict[int, tuple[int, float]]  # passes and their seconds, by number of rows


@dataclass(frozen=True, slots=True)
class GoodputStats:
    """Sums over steps without prefill that decode at least `num_sequences` and fewer than twice as many."""

    num_sequences: int
    num_tokens: int = 0  # committed tokens: accepted drafts, and a recovered or bonus token per sequence and pass
    seconds: float = 0.0
    passes: PassSums = field(default_factory=dict)  # on a CPU only


class GoodputMeter:
    """Sums the steps without prefill, since prefill time would hide the effect of drafts.

    Args:
        times_passes: time the passes by number of rows. False on a GPU, where the host only issues a pass.
    """

    def __init__(self, *, times_passes: bool) -> None:
        self._times_passes = times_passes
        self._sums: dict[int, tuple[int, float]] = {}
        self._passes: dict[int, PassSums] = defaultdict(dict)

    def on_pass(self, record: PassRecord) -> None:
        """Add a step."""
        if record.num_prefill_tokens or not record.num_decode_sequences:
            return
        size = 1 << (record.num_decode_sequences.bit_length() - 1)
        num_tokens, seconds = self._sums.get(size, (0, 0.0))
        self._sums[size] = num_tokens + record.num_committed_tokens, seconds + record.times.total_s
        if self._times_passes:
            num_rows = record.num_decode_sequences + record.num_drafts
            num_passes, pass_s = self._passes[size].get(num_rows, (0, 0.0))
            self._passes[size][num_rows] = num_passes + 1, pass_s + record.times.forward_s

    def snapshot(self) -> tuple[GoodputStats, ...]:
        """Return the sums since the start."""
        return tuple(GoodputStats(size, *sums, {**self._passes[size]}) for size, sums in sorted(self._sums.items()))


def since(earlier: Seq[GoodputStats], now: Seq[GoodputStats]) -> tuple[GoodputStats, ...] | None:
    """Return the difference of two snapshots; None if the engine restarted between them."""
    before = {each.num_sequences: each for each in earlier}
    if not before.keys() <= {each.num_sequences for each in now}:
        return None
    differences = []
    for each in now:
        past = before.get(each.num_sequences, GoodputStats(each.num_sequences))
        passes = _passes_since(past.passes, each.passes)
        differences.append(
            GoodputStats(each.num_sequences, each.num_tokens - past.num_tokens, each.seconds - past.seconds, passes)
        )
    return None if any(each.num_tokens < 0 or each.seconds < 0 for each in differences) else tuple(differences)


def _passes_since(earlier: PassSums, now: PassSums) -> PassSums:
    differences = {}
    for num_rows, (num_passes, seconds) in now.items():
        num_before, before_s = earlier.get(num_rows, (0, 0.0))
        if num_passes != num_before:
            differences[num_rows] = num_passes - num_before, seconds - before_s
    return differences


def seconds_of(sums: Seq[GoodputStats]) -> float:
    """Return the seconds of all steps."""
    return sum(each.seconds for each in sums)


def log_ratio(new: Seq[GoodputStats], old: Seq[GoodputStats]) -> float | None:
    """Return the logarithm of new over old tokens per second under equal load; None without a common load.

    Each number of sequences is weighted by the time that both spent at it. Passes over the same number of rows count
    with their mean time over both, so a machine that was slower during one draft does not bias the comparison.
    """
    others = {each.num_sequences: each for each in old if each.num_tokens > 0 and each.seconds > 0}
    total = weights = 0.0
    # Only loads that occur in both are compared.
    for each in new:
        other = others.get(each.num_sequences)
        if other is None or each.num_tokens <= 0 or each.seconds <= 0:
            continue
        weight = min(each.seconds, other.seconds)
        excess_s = _excess_s(each.passes, other.passes)
        new_speed = each.num_tokens / (each.seconds - excess_s)
        total += weight * math.log(new_speed / (other.num_tokens / (other.seconds + excess_s)))
        weights += weight
    return total / weights if weights else None


def _excess_s(new: PassSums, old: PassSums) -> float:
    """Return the new passes' seconds above the mean of both per number of rows. The old ones are as far below it."""
    excess_s = 0.0
    for num_rows in new.keys() & old.keys():
        (num_new, new_s), (num_old, old_s) = new[num_rows], old[num_rows]
        excess_s += new_s - num_new * (new_s + old_s) / (num_new + num_old)
    return excess_s

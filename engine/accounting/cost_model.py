"""Learns the seconds of a pass online: the target's by its sequences and rows, the draft's by its steps and tokens.

`engine.accounting.rates` learns another model of a step's time, for the router and the prefill decision. They need
tokens per second of whole requests and know no rows. The length policy compares two sizes of a pass, which needs a
curve over rows, so neither model can replace the other.

It uses plain floats and short lists: it runs once per pass, and a numpy call on such short arrays is slower.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from dataclasses import dataclass
from math import exp, inf, log, sqrt

import numpy as np
from numpy.typing import NDArray

from engine.accounting.draft_cost import DraftCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NOISE_STEP = 1.05  # factor that moves the noise until half of the passes are within 0.67 of it
_REACH = 2.0  # the curve covers sizes up to this multiple of the largest one seen
# 1 to 9, 12, 16, 24 ... rows: close enough for a straight line between neighbours. Costs of few rows rise in steps.
_GRID = sorted({*range(1, 10), *(2**i for i in range(1, 17)), *(3 * 2**i for i in range(16))})
_OUTLIER_WEIGHT = 0.01  # of a pass: the weight of an outlier at a size that was never seen
_FAMILIAR = 0.5  # familiarity of a size with one pass
_APART = 1.5  # least ratio of two sizes whose difference gives the cost of a row
_RISE = 0.5  # of the known cost of a row, or of its experts, assumed per row at sizes that were never seen
_LEAST_SHARE = 0.01  # of a pass's time: the least cost of sampled rows, even if a prompt hides it
_RECENT_CURVE = 16  # passes: the age of a curve that is good enough for shares of a pass
_GRID_ARRAY = np.array(_GRID, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """The bytes that a pass reads of a mixture of experts, where each row chooses its own.

    Attributes:
        share: the experts' part of the bytes that a pass of one row reads.
        chance: the part of all experts that a row chooses.
    """

    share: float
    chance: float

    def growth(self, num_rows: int) -> float:
        """Return the bytes of a pass relative to a pass of one row, if rows choose independently."""
        met: float = (1.0 - (1.0 - self.chance) ** num_rows) / self.chance
        return 1.0 + self.share * (met - 1.0)


DENSE = ExpertReads(0.0, 1.0)


class PassCurve:
    """The seconds of a pass by its number of rows, prompt rows included: a curve through grid points, learned online.

    A machine that is slower for a while is slower at every size, and a choice between two sizes depends on their ratio.
    So a common drift follows the last few passes quickly, and the grid points, which hold the shape, move slowly. Some
    passes are several times slower for reasons outside the engine: the drift is a median, and a grid point ignores the
    part of a residual above a few times the noise. Between grid points the curve is straight, and it never falls.

    A grid point without passes is assumed to be cheap, so that it is tried once. It costs as much as the next smaller
    one, plus a part of the known cost per row for each further row, since further rows are seldom cheaper; or a part of
    the reads that the further rows' `experts` add, if that is more.
    """

    def __init__(self, experts: ExpertReads = DENSE) -> None:
        self._experts = experts
        self._log_s = [0.0] * len(_GRID)
        self._num_seen = [0.0] * len(_GRID)  # decayed count of passes
        self._num_known = 0  # grid points up to the largest one seen
        # Up to four outliers do not move their median.
        self._recent: deque[float] = deque(maxlen=9)  # log of measured seconds over the shape's seconds
        self._drift = 0.0
        self._noise = 0.1  # usual deviation of known sizes: half of all passes are within 0.67 of it
        self._expected: list[float] = []  # cached curve
        self._age = 0  # passes since then

    def weak_copy(self) -> PassCurve:
        """Return the same curve with each size counted as at most one pass."""
        copy = PassCurve(self._experts)
        copy._log_s = list(self._log_s)
        copy._num_seen = [min(number, 1.0) for number in self._num_seen]
        copy._num_known, copy._drift, copy._noise = self._num_known, self._drift, self._noise
        copy._recent = self._recent.copy()
        return copy

    @property
    def noise(self) -> float:
        """The usual relative deviation of a pass from the curve."""
        return self._noise

    @property
    def max_rows(self) -> int:
        """The largest pass that the curve covers: twice the largest one seen; 0 before the first pass."""
        return int(_REACH * _GRID[self._num_known - 1]) if self._num_known else 0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record one pass."""
        near = _neighbours(num_rows)
        if not self._num_known:
            self._begin(near, seconds)
            return
        # Compare the pass with the earlier ones of its size, without drift.
        self._add_unseen(near)
        expected = self._log_seconds(near)
        # A pass counts a third after about a thousand further passes.
        self._num_seen = [0.999 * number for number in self._num_seen]
        familiarity = sum(share * self._num_seen[point] / (self._num_seen[point] + 1.0) for point, share in near)
        surprise = log(seconds) - expected
        # Split the surprise: a part is drift, and the residual moves the noise and the shape.
        self._learn_drift(surprise, familiarity)
        residual = surprise - self._drift
        limit = self._largest_residual(near, familiarity)
        if familiarity >= _FAMILIAR:
            self._learn_noise(min(abs(residual), limit))
        weight = _OUTLIER_WEIGHT if residual > limit and familiarity < _FAMILIAR else 1.0
        self._learn_shape(near, min(residual, limit), weight)
        self._num_known = max(self._num_known, near[-1][0] + 1)
        self._age += 1 if familiarity >= _FAMILIAR else _RECENT_CURVE + 1

    def _begin(self, near: list[tuple[int, float]], seconds: float) -> None:
        """Record the first pass, which sets the level of the curve."""
        for point, _ in near:
            self._log_s[point], self._num_seen[point] = log(seconds), 1.0
        self._num_known = near[-1][0] + 1

    def _add_unseen(self, near: list[tuple[int, float]]) -> None:
        """Set grid points without passes to the current curve."""
        for point, _ in near:
            if self._num_seen[point] == 0.0:
                self._log_s[point] = log(self.at(_GRID[point])) - self._drift

    def _log_seconds(self, near: list[tuple[int, float]]) -> float:
        """Return the logarithm of the seconds between grid points, without drift."""
        if len(near) == 1:
            return self._log_s[near[0][0]]
        return log(sum([share * exp(self._log_s[point]) for point, share in near]))

    def _learn_shape(self, near: list[tuple[int, float]], residual: float, weight: float) -> None:
        """Move the grid points of a size by the residual of a pass, which counts as `weight` passes."""
        norm = sum(share * share for _, share in near)
        for point, share in near:
            # The grid point itself moves by a twentieth of the residual at least.
            rate = max(0.05, 1.0 / (self._num_seen[point] + 1.0))
            self._log_s[point] += rate * share / norm * residual
            self._num_seen[point] += weight * share

    def _learn_drift(self, surprise: float, familiarity: float) -> None:
        """Follow the median of recent surprises; an unknown size cannot separate drift from shape."""
        if familiarity >= _FAMILIAR:
            self._recent.append(surprise)
            self._drift = sorted(self._recent)[(len(self._recent) - 1) // 2]

    def _learn_noise(self, deviation: float) -> None:
        factor = _NOISE_STEP if deviation > 0.67 * self._noise else 1.0 / _NOISE_STEP
        self._noise = max(0.002, factor * self._noise)

    def _largest_residual(self, near: list[tuple[int, float]], familiarity: float) -> float:
        """Return the residual above which a pass is an outlier, in logarithms of seconds.

        A pass of a known size is an outlier if it is much too slow; a pass of a new size, if it is slower than its
        number of rows explains. A pass is never too fast by accident.
        """
        limit = 3.0 * self._noise  # a pass with a larger residual is an outlier
        if familiarity < _FAMILIAR:
            below = range(near[-1][0] - 1, -1, -1)
            smaller = next((point for point in below if self._num_seen[point] > _OUTLIER_WEIGHT), 0)
            limit += log(_GRID[near[-1][0]] / _GRID[smaller])
        return limit

    def at(self, num_rows: int, max_age: int = 0) -> float:
        """Return the expected seconds of a pass; 0 for an empty one. Needs one observed pass.

        The last `max_age` passes may be left out, which saves time.
        """
        if num_rows == 0:
            return 0.0
        if self._age > max_age or not self._expected:
            self._expected, self._age = self._curve(0.0), 0
        last = len(self._expected) - 1
        return sum([share * self._expected[min(point, last)] for point, share in _neighbours(num_rows)])

    def seconds(self, num_rows: Ints, optimism: float = 0.0) -> Floats:
        """Return the expected seconds of passes of `num_rows` rows; 0 for an empty one. Needs one observed pass.

        `optimism` lowers each grid point by this number of standard errors, and ignores a grid point whose only pass
        was an outlier. So a size is tried again if one slow pass made it look expensive, or if it was not seen for
        long.
        """
        curve = self._curve(optimism)
        return np.where(num_rows > 0, np.interp(num_rows, _GRID_ARRAY[: len(curve)], curve), 0.0)

    def _curve(self, optimism: float) -> list[float]:
        """Return the seconds at each grid point up to `max_rows`.

        Neighbours with falling seconds are averaged, weighted by their passes (pool adjacent violators).
        """
        doubt, enough = optimism * self._noise, _OUTLIER_WEIGHT if optimism > 0.0 else 0.0
        known: list[int] = []  # grid points
        levels: list[tuple[float, float, int]] = []  # equal seconds of neighbours, their passes, and their number
        for point, (log_s, number) in enumerate(zip(self._log_s[: self._num_known], self._num_seen, strict=False)):
            if number <= enough and (levels or number == 0.0):
                continue
            known.append(point)
            seconds, size = exp(log_s + self._drift - doubt / sqrt(number)), 1
            while levels and levels[-1][0] > seconds:
                below_s, num_below, size_below = levels.pop()
                seconds = (num_below * below_s + number * seconds) / (num_below + number)
                number, size = num_below + number, size_below + size
            levels.append((seconds, number, size))
        by_point = [seconds for seconds, _, size in levels for _ in range(size)]
        return _extended([*zip(known, by_point, strict=True)], self._experts)


def _extended(known: list[tuple[int, float]], experts: ExpertReads) -> list[float]:
    """Return the seconds at all grid points up to twice the last known one; unknown ones are extrapolated from below.

    The curve is constant before the first known point.
    """
    curve = [known[0][1]] * known[0][0]
    # Up to `_REACH` times the largest size seen.
    ends = [*(point for point, _ in known[1:]), bisect_right(_GRID, _REACH * _GRID[known[-1][0]])]
    limits = [*(seconds for _, seconds in known[1:]), inf]
    far = 0  # the last known point that is far enough from the current one
    # For each known point, fill the unknown points of (point, end), at most up to the next known seconds.
    for (point, seconds), end, limit in zip(known, ends, limits, strict=True):
        curve.append(seconds)
        if end == point + 1:
            continue
        # The cost of a row comes from the known point that is far enough below.
        rows = _GRID[point]
        while far + 1 < len(known) and _GRID[known[far + 1][0]] * _APART <= rows:
            far += 1
        below, below_s = known[far]
        row_s = _RISE * (seconds - below_s) / (rows - _GRID[below]) if _GRID[below] * _APART <= rows else 0.0
        for more in _GRID[point + 1 : end]:
            reads_s = _RISE * seconds * (experts.growth(more) / experts.growth(rows) - 1.0)
            curve.append(min(seconds + max(row_s * (more - rows), reads_s), limit))
    return curve


def _neighbours(num_rows: int) -> list[tuple[int, float]]:
    """Return the grid points around a size with their interpolation weights; a single one for a size on the grid."""
    num_rows = min(max(num_rows, 1), _GRID[-1])
    right = bisect_left(_GRID, num_rows)
    if _GRID[right] == num_rows:
        return [(right, 1.0)]
    low, high = _GRID[right - 1], _GRID[right]
    share = (num_rows - low) / (high - low)
    return [(right - 1, 1.0 - share), (right, share)]


def size_class(num_sequences: int) -> int:
    """Return the number of a class of batch sizes: 1, 2, 3 to 5, 6 to 11, 12 to 22, 23 to 45 ...

    A full batch is mostly a power of two, and has a sequence less while a prompt takes its place: both are one class.
    """
    return int(sqrt(2.0) * num_sequences).bit_length()


@dataclass(frozen=True, slots=True)
class RowSeconds:
    """The seconds of a pass by its number of drafts, 0 to M.

    A prompt in a pass hides a part of the other rows' time: they use time that reading the weights leaves free. How
    many passes have prompts depends on the requests, and not on drafts: the more tokens a pass gives, the fewer passes
    have no prompt.

    Attributes:
        alone: `[M + 1]`, without prompts.
        hidden: `[M + 1]`, the part that a prompt hides.
        prompt_share: the share of recent passes that had prompts.
        num_tokens: the mean tokens of a recent pass.
    """

    alone: Floats
    hidden: Floats
    prompt_share: float = 0.0
    num_tokens: float = 1.0

    def at(self, num_drafts: Ints | int, num_tokens: Floats | float) -> Floats:
        """Return the mean seconds of passes with `num_drafts` that give `num_tokens`."""
        share = np.minimum(1.0, self.prompt_share / self.num_tokens * num_tokens)
        found: Floats = self.alone[num_drafts] - share * self.hidden[num_drafts]
        return found

    @property
    def recent(self) -> Floats:
        """The mean seconds with prompts as in recent passes, `[M + 1]`."""
        return self.alone - self.prompt_share * self.hidden


class CostModel:
    """The seconds of passes and of their drafts.

    There is one curve over rows for each `size_class` of batches, since each sequence adds a context to attend to.
    Call `set_size` before a question about passes of another number of sequences.
    """

    def __init__(self, experts: ExpertReads = DENSE) -> None:
        self.drafts = DraftCosts()
        self._curve = PassCurve(experts)
        self._curves: dict[int, PassCurve] = {}  # by class of batch sizes
        self._recent: deque[tuple[int, int]] = deque(maxlen=32)  # prompt rows and tokens of passes

    @property
    def is_known(self) -> bool:
        """True after the first observed pass."""
        return self._curve.max_rows > 0

    @property
    def noise(self) -> float:
        """The usual relative deviation of a pass from its expected seconds."""
        return self._curve.noise

    def forget_drafts(self) -> None:
        """Forget the costs of drafts, since other models make them now."""
        self.drafts = DraftCosts()

    def set_size(self, num_sequences: int) -> None:
        """Select the curve of passes with about as many sequences."""
        name = size_class(num_sequences)
        if name not in self._curves:
            self._curves[name] = self._curve.weak_copy()
        self._curve = self._curves[name]

    def observe(self, num_prompt_rows: int, num_rows: int, seconds: float) -> None:
        """Record a pass with `num_rows` sampled rows. One with prompts is ignored as the first pass of all."""
        if num_prompt_rows == 0 or self.is_known:
            self._curve.observe(num_prompt_rows + num_rows, seconds)

    def count(self, num_prompt_rows: int, num_tokens: int) -> None:
        """Record the prompt rows and the tokens of a pass."""
        self._recent.append((num_prompt_rows, num_tokens))

    def pass_s(self, num_rows: int) -> float:
        """Return the expected seconds of a pass without prompts."""
        return self._curve.at(num_rows)

    def room(self, num_rows: int) -> int:
        """Return how many more rows than `num_rows` the curve covers."""
        return self._curve.max_rows - num_rows - max(self._known_prompts(num_rows), default=0)

    def _known_prompts(self, num_rows: int) -> list[int]:
        """Return the prompt rows of recent passes, where the curve covers them together with `num_rows`."""
        return [rows for rows, _ in self._recent if 0 < rows <= self._curve.max_rows - num_rows]

    def row_seconds(self, num_rows: int, num_drafts: int, *, is_optimistic: bool) -> RowSeconds:
        """Return the seconds that `num_rows` to `num_rows + num_drafts` sampled rows add to a pass.

        With prompts it is the mean over the prompts of recent passes. If optimistic, sizes that may be cheaper are
        tried again.
        """
        optimism = 2.0 if is_optimistic else 0.0  # standard errors
        sizes = np.arange(num_rows, num_rows + num_drafts + 1)
        plain_s = self._curve.at(num_rows)  # it is measured again and again, and a cheap one would end all drafts
        prompts = Counter(self._known_prompts(num_rows))
        if not prompts:
            return RowSeconds(np.maximum(self._curve.seconds(sizes, optimism), plain_s), np.zeros(len(sizes)))
        whole_s = self._curve.seconds(np.array([0, *prompts])[:, None] + np.append(0, sizes), optimism)
        whole_s[0, 1:] = np.maximum(whole_s[0, 1:], plain_s)
        added_s = np.maximum(whole_s[:, 1:] - whole_s[:, :1], _LEAST_SHARE * whole_s[:, 1:])
        next_to_prompts_s = np.array(list(prompts.values())) / prompts.total() @ added_s[1:]
        return RowSeconds(
            added_s[0],
            np.maximum(added_s[0] - next_to_prompts_s, 0.0),
            prompts.total() / len(self._recent),
            sum(tokens for _, tokens in self._recent) / len(self._recent),
        )

    @property
    def has_prompts(self) -> bool:
        """True if each recent pass had a prompt."""
        return all(rows > 0 for rows, _ in self._recent)

    def split(self, num_prompt_rows: int, num_rows: int, num_fewer: int) -> tuple[float, float, float]:
        """Return a pass's expected seconds, the share that its sampled rows add, and the share of those without some.

        The last is the ratio of what `num_rows - num_fewer` rows add to what `num_rows` add.
        """
        num_whole = num_prompt_rows + num_rows
        whole_s, prompts_s, without_s = (
            self._curve.at(number, _RECENT_CURVE) for number in (num_whole, num_prompt_rows, num_whole - num_fewer)
        )
        least_s = _LEAST_SHARE * whole_s
        added_s = max(whole_s - prompts_s, least_s)
        return whole_s, added_s / whole_s, max(without_s - prompts_s, least_s) / added_s

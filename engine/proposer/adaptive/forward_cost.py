"""The cost of a pass, learned from the passes themselves: the target by its rows, the draft by its steps and tokens.

`engine.stats.rates` learns a second model of a step's time. It serves the router and the prefill decision, which ask
for tokens per second of whole requests and know nothing of rows; the draft budget compares two sizes of one pass, which
takes a curve over rows. Neither can answer for the other.

Plain floats and short lists: this runs once per pass, where a numpy call costs more than it computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import exp, inf, log, sqrt

import numpy as np

from engine.proposer.adaptive.acceptance import Floats, Ints

_NUM_RECENT = 9  # passes whose median is the drift, which moves all sizes: up to four hiccups leave it alone
_SHAPE_RATE = 0.05  # of a surprise beside the drift, at least so much is this size's own
_CLIP = 3.0  # times the usual deviation: a pass that surprises by more was a hiccup
_FADE = 0.999  # per pass: what was seen some thousand passes ago counts a third
_FIRST_NOISE = 0.1  # usual deviation, relative, until it is measured
_LEAST_NOISE = 0.002
_NOISE_STEP = 1.05  # the usual deviation is moved by so much until as many passes are within two thirds of it as not
_REACH = 2.0  # sizes are known up to so many times the largest one seen
# 1, 2, 3, 4, 6, 8, 12, 16 ... rows: near enough to each other for a straight line between two.
_GRID = sorted({1, *(2**i for i in range(1, 17)), *(3 * 2**i for i in range(16))})
_BEYOND = 2  # grid points behind the largest one seen that the curve has too, to `_REACH` times that
_HARDLY = 0.01  # of a pass: what a pass counts for that cannot be what its size costs
_FAMILIAR = 0.5  # a size with a pass or more
_APART = 1.5  # times a size is another that is far enough from it to tell what a row costs
_RISE = 0.5  # of what a row has cost, for each row of a size that was never seen
_GRID_ARRAY = np.array(_GRID, dtype=np.float64)


class ForwardCost:
    """Seconds of a pass by its number of rows, those of prompts too: a curve through grid points, learned online.

    A machine that is slower for a while is slower at every size, and the choice between two sizes hangs on their ratio.
    So a common drift follows the last few passes, while the grid points, which hold the shape, move slowly. Some passes
    take several times what they should, for reasons outside the engine: the drift is a median, and a grid point
    believes no surprise beyond a few usual ones. Between grid points the curve is straight; it never falls. A grid
    point that was never seen is taken to cost little, so that it is tried once: what the next smaller one does, and for
    each row more a part of what the rows below have cost, since further rows seldom cost less than that.
    """

    def __init__(self) -> None:
        self._log_s = [0.0] * len(_GRID)
        self._num_seen = [0.0] * len(_GRID)  # passes, old ones fading
        self._num_known = 0  # grid points up to the largest that was seen
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)  # log of seconds over the shape's
        self._drift = 0.0
        self._noise = _FIRST_NOISE  # the usual deviation of known sizes: half of all passes are within 0.67 of it
        self._expected: list[float] = []  # the curve as it is now, empty until it is needed

    def weak_copy(self) -> ForwardCost:
        """Return the same curve, as one that has seen each of its sizes once at most."""
        guess = ForwardCost()
        guess._log_s = list(self._log_s)
        guess._num_seen = [min(number, 1.0) for number in self._num_seen]
        guess._num_known, guess._drift, guess._noise = self._num_known, self._drift, self._noise
        guess._recent = self._recent.copy()
        return guess

    @property
    def noise(self) -> float:
        """The usual deviation of a pass from the curve, relative."""
        return self._noise

    @property
    def max_rows(self) -> int:
        """The largest pass that the curve covers: twice the largest that was seen, 0 before any was."""
        return int(_REACH * _GRID[self._num_known - 1]) if self._num_known else 0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Take in one pass."""
        near = _neighbours(num_rows)
        if not self._num_known:
            self._begin(near, seconds)
            return
        expected = log(self.at(num_rows)) - self._drift
        self._add_unseen(near, expected)
        self._num_seen = [_FADE * number for number in self._num_seen]
        familiarity = sum(share * self._num_seen[point] / (self._num_seen[point] + 1.0) for point, share in near)
        surprise = log(seconds) - expected
        self._learn_drift(surprise, familiarity)
        rest = surprise - self._drift
        limit = self._largest_surprise(near, familiarity)
        if familiarity >= _FAMILIAR:
            self._learn_noise(min(abs(rest), limit))
        counts_for = _HARDLY if rest > limit and familiarity < _FAMILIAR else 1.0
        self._learn_shape(near, min(rest, limit), counts_for)
        self._num_known = max(self._num_known, near[-1][0] + 1)
        self._expected = []

    def _begin(self, near: list[tuple[int, float]], seconds: float) -> None:
        """Take in the first pass, which sets the level of the curve."""
        for point, _ in near:
            self._log_s[point], self._num_seen[point] = log(seconds), 1.0
        self._num_known = near[-1][0] + 1

    def _add_unseen(self, near: list[tuple[int, float]], expected: float) -> None:
        """Start grid points that no pass has had from the curve as it is."""
        for point, _ in near:
            if self._num_seen[point] == 0.0:
                self._log_s[point] = expected

    def _learn_shape(self, near: list[tuple[int, float]], rest: float, counts_for: float) -> None:
        """Move the grid points of a size by the part of a surprise that is not drift."""
        weight = sum(share * share for _, share in near)
        for point, share in near:
            rate = max(_SHAPE_RATE, 1.0 / (self._num_seen[point] + 1.0))
            self._log_s[point] += rate * share / weight * rest
            self._num_seen[point] += counts_for * share

    def _learn_drift(self, surprise: float, familiarity: float) -> None:
        """Follow the median of recent surprises; only sizes that are known tell drift from shape."""
        if familiarity >= _FAMILIAR:
            self._recent.append(surprise)
            self._drift = sorted(self._recent)[(len(self._recent) - 1) // 2]

    def _learn_noise(self, deviation: float) -> None:
        factor = _NOISE_STEP if deviation > 0.67 * self._noise else 1.0 / _NOISE_STEP
        self._noise = max(_LEAST_NOISE, factor * self._noise)

    def _largest_surprise(self, near: list[tuple[int, float]], familiarity: float) -> float:
        """Return the largest surprise to believe, in logarithms of seconds.

        No pass is too fast by accident. One of a known size that is much too slow is a hiccup, and so is one of a new
        size that costs more than its rows would.
        """
        limit = _CLIP * self._noise
        if familiarity < _FAMILIAR:
            smaller = next((point for point in range(near[-1][0] - 1, -1, -1) if self._num_seen[point] > _HARDLY), 0)
            limit += log(_GRID[near[-1][0]] / _GRID[smaller])
        return limit

    def at(self, num_rows: int) -> float:
        """Return the expected seconds of a pass of this size, 0 of an empty one; needs one observed pass."""
        if num_rows == 0:
            return 0.0
        if not self._expected:
            self._expected = self._curve(0.0)
        last = len(self._expected) - 1
        return sum(share * self._expected[min(point, last)] for point, share in _neighbours(num_rows))

    def seconds(self, num_rows: Ints, optimism: float = 0.0) -> Floats:
        """Return the expected seconds of passes of `num_rows` rows, 0 for none; needs one observed pass.

        `optimism` lowers each grid point by so many standard errors of what is known of it, and takes one whose only
        pass was a hiccup as never seen, so that a size that one slow pass made look dear, or that was not seen for
        long, is tried again.
        """
        curve = self._curve(optimism)
        return np.where(num_rows > 0, np.interp(num_rows, _GRID_ARRAY[: len(curve)], curve), 0.0)

    def _curve(self, optimism: float) -> list[float]:
        """Return the seconds at each grid point up to `max_rows`.

        Where they would fall, neighbours are averaged, weighted with their passes (pool adjacent violators).
        """
        doubt, enough = optimism * self._noise, _HARDLY if optimism > 0.0 else 0.0
        levels: list[_Level] = []
        for point, (log_s, number) in enumerate(zip(self._log_s[: self._num_known], self._num_seen, strict=False)):
            if number <= enough and (levels or number == 0.0):
                continue
            level = _Level(exp(log_s + self._drift - doubt / sqrt(number)), number, [point])
            while levels and levels[-1].seconds > level.seconds:
                level.absorb(levels.pop())
            levels.append(level)
        return _through([(point, level.seconds) for level in levels for point in level.points])


@dataclass(slots=True)
class _Level:
    """Neighbouring grid points that cost the same: their seconds, and the passes that say so."""

    seconds: float
    num_seen: float
    points: list[int]

    def absorb(self, other: _Level) -> None:
        num_seen = self.num_seen + other.num_seen
        self.seconds = (self.num_seen * self.seconds + other.num_seen * other.seconds) / num_seen
        self.num_seen = num_seen
        self.points = other.points + self.points


def _through(known: list[tuple[int, float]]) -> list[float]:
    """Return the seconds at all grid points up to twice the last known one: they rise on behind each as before it."""
    curve = [known[0][1]] * known[0][0]
    ends = [*(point for point, _ in known[1:]), min(known[-1][0] + 1 + _BEYOND, len(_GRID))]
    limits = [*(seconds for _, seconds in known[1:]), inf]
    far = 0  # the last known point that is far enough from the current one
    for (point, seconds), end, limit in zip(known, ends, limits, strict=True):
        curve.append(seconds)
        if end == point + 1:
            continue
        rows = _GRID[point]
        while far + 1 < len(known) and _GRID[known[far + 1][0]] * _APART <= rows:
            far += 1
        below, below_s = known[far]
        row_s = _RISE * (seconds - below_s) / (rows - _GRID[below]) if _GRID[below] * _APART <= rows else 0.0
        curve += [min(seconds + row_s * (_GRID[unseen] - rows), limit) for unseen in range(point + 1, end)]
    return curve


def _neighbours(num_rows: int) -> list[tuple[int, float]]:
    """Return the grid points on both sides of a size and its share of each; one where it falls on it."""
    num_rows = min(max(num_rows, 1), _GRID[-1])
    right = bisect_left(_GRID, num_rows)
    if _GRID[right] == num_rows:
        return [(right, 1.0)]
    low, high = _GRID[right - 1], _GRID[right]
    share = (num_rows - low) / (high - low)
    return [(right - 1, 1.0 - share), (right, share)]


class DraftCost:
    """Seconds the target waits for drafts: so much per step of the longest one, and so much per token of all.

    How the two compare is fitted by least squares over recent passes, what both cost by the median pass: one that took
    several times what it should moves nothing. Where steps and tokens have been the same (one stream), the time is
    taken to go with the steps: a draft model computes all sequences of a step at once.
    """

    _NUM_RECENT = 15
    _FADE = 0.95
    _TOKEN_DOUBT = 0.01
    _STEP_DOUBT = 1e-6

    def __init__(self) -> None:
        self._steps_2 = self._steps_tokens = self._tokens_2 = 0.0  # decayed sums of products
        self._steps_s = self._tokens_s = 0.0
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=self._NUM_RECENT)  # steps, tokens, seconds
        self.per_step_s = 0.0
        self.per_token_s = 0.0

    @property
    def is_known(self) -> bool:
        """True once a pass was observed."""
        return bool(self._recent)

    def observe(self, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Take in one pass that asked for `num_tokens` drafts, the longest of `num_steps`."""
        self._recent.append((num_steps, num_tokens, seconds))
        expected_s = self.seconds(num_steps, num_tokens)
        if expected_s > 0:
            seconds = min(seconds, 2.0 * expected_s)
        self._steps_2 = self._FADE * self._steps_2 + num_steps * num_steps
        self._steps_tokens = self._FADE * self._steps_tokens + num_steps * num_tokens
        self._tokens_2 = self._FADE * self._tokens_2 + num_tokens * num_tokens
        self._steps_s = self._FADE * self._steps_s + num_steps * seconds
        self._tokens_s = self._FADE * self._tokens_s + num_tokens * seconds
        self._fit()

    def seconds(self, num_steps: int, num_tokens: int) -> float:
        """Return the expected seconds for drafts of this size; 0 before any was observed."""
        return self.per_step_s * num_steps + self.per_token_s * num_tokens

    def _fit(self) -> None:
        """Solve the two normal equations; a price below zero is none. Then scale both to the median pass."""
        steps_2 = (1.0 + self._STEP_DOUBT) * self._steps_2
        tokens_2 = (1.0 + self._TOKEN_DOUBT) * self._tokens_2
        determinant = steps_2 * tokens_2 - self._steps_tokens**2
        per_step_s = (tokens_2 * self._steps_s - self._steps_tokens * self._tokens_s) / determinant
        per_token_s = (steps_2 * self._tokens_s - self._steps_tokens * self._steps_s) / determinant
        if per_token_s < 0:
            per_step_s, per_token_s = self._steps_s / self._steps_2, 0.0
        elif per_step_s < 0:
            per_step_s, per_token_s = 0.0, self._tokens_s / self._tokens_2
        fitted = [(steps * per_step_s + tokens * per_token_s, seconds) for steps, tokens, seconds in self._recent]
        ratios = sorted(seconds / expected_s for expected_s, seconds in fitted if expected_s > 0.0)
        scale = ratios[(len(ratios) - 1) // 2] if ratios else 1.0
        self.per_step_s, self.per_token_s = scale * per_step_s, scale * per_token_s

"""What a pass costs, learned from the passes themselves: the target by its rows, the draft by its steps and tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CLIP = np.log(4.0)  # a pass that took four times the expected is taken to be a hiccup of at most that
_DRIFT_RATE = 0.2  # of a surprise at a size that is known, so much is the machine's mood and moves all sizes
_SHAPE_RATE = 0.05  # and at least so much of the rest is this size's own
_FADE = 0.999  # per pass: what was seen some thousand passes ago counts a third
_FIRST_NOISE = 0.1  # relative, until it is measured
_NOISE_RATE = 0.05
_REACH = 2.0  # sizes are known up to so many times the largest one seen
_MAX_ROWS = 1 << 16


def _knots() -> Ints:
    """1, 2, 3, 4, 6, 8, 12, 16 ... rows: near enough to each other for a straight line between two."""
    powers = 2 ** np.arange(1, 17)
    return np.unique(np.concatenate(([1], powers, powers * 3 // 2)))


class RowCost:
    """Seconds of a pass without prefill by its number of rows: a curve through knots, learned online.

    A machine that is slower for a while is slower at every size, and the choice between two sizes hangs on their ratio.
    So a common drift follows the last few passes, while the knots, which hold the shape, move slowly. Between knots the
    curve is straight, and it never falls. A knot that was never seen is taken to cost what the next smaller one does,
    the least it can: whoever chooses by this curve will try it once and know.
    """

    def __init__(self) -> None:
        self._knots = _knots()
        self._log_s = np.zeros(len(self._knots))
        self._num_seen = np.zeros(len(self._knots))  # passes, old ones fading
        self._drift = 0.0
        self._noise = _FIRST_NOISE**2  # mean square of what a known size surprises by

    @property
    def max_rows(self) -> int:
        """The largest pass that may be reckoned with: twice the largest that was seen, 0 before any was."""
        seen = self._knots[self._num_seen > 0]
        return int(_REACH * seen[-1]) if len(seen) else 0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Take in one pass."""
        num_rows = min(max(num_rows, 1), _MAX_ROWS)
        near, shares = self._neighbours(num_rows)
        if not self._num_seen.any():
            self._log_s[near] = np.log(seconds)
            self._num_seen[near] = 1.0
            return
        expected_s = float(self.seconds(np.array([num_rows]))[0])
        surprise = float(np.clip(np.log(seconds / expected_s), -_CLIP, _CLIP))
        self._num_seen *= _FADE
        is_fresh = self._num_seen[near] == 0
        self._log_s[near[is_fresh]] = np.log(expected_s) - self._drift
        familiarity = float(shares @ (self._num_seen[near] / (self._num_seen[near] + 1.0)))
        drift = _DRIFT_RATE * familiarity * surprise
        self._drift += drift
        self._noise += _NOISE_RATE * familiarity * ((surprise - drift) ** 2 - self._noise)
        rates = np.maximum(_SHAPE_RATE, 1.0 / (self._num_seen[near] + 1.0))
        self._log_s[near] += rates * shares / (shares @ shares) * (surprise - drift)
        self._num_seen[near] += shares

    def seconds(self, num_rows: Ints, optimism: float = 0.0) -> Floats:
        """Expected seconds of passes of these sizes, `[n]`; needs one observed pass.

        `optimism` lowers each knot by so many standard errors of what is known of it, so that a size that one slow pass
        has put in a bad light, or that was not seen for long, is tried again.
        """
        is_seen = self._num_seen > 0
        doubt = np.sqrt(self._noise / np.where(is_seen, self._num_seen, 1.0))
        values = np.where(is_seen, np.exp(self._log_s + self._drift - optimism * doubt), 0.0)
        values = np.maximum.accumulate(values)
        return np.interp(num_rows, self._knots, np.where(values > 0, values, values[is_seen.argmax()]))

    def _neighbours(self, num_rows: int) -> tuple[Ints, Floats]:
        """The knots on both sides of a size and its share of each; one knot where it falls on it."""
        right = int(np.searchsorted(self._knots, num_rows))
        if self._knots[right] == num_rows:
            return np.array([right]), np.array([1.0])
        low, high = self._knots[right - 1], self._knots[right]
        share = (num_rows - low) / (high - low)
        return np.array([right - 1, right]), np.array([1.0 - share, share])


class DraftCost:
    """Seconds the target waits for drafts: so much per step of the longest one, and so much per token of all.

    Fitted by least squares over recent passes. Where steps and tokens have been the same (one stream), the time is
    taken to go with the steps: a draft model computes all sequences of a step at once.
    """

    _FADE = 0.95
    _TOKEN_DOUBT = 0.01

    def __init__(self) -> None:
        self._moments = np.zeros((2, 2))
        self._products = np.zeros(2)
        self.per_step_s = 0.0
        self.per_token_s = 0.0

    def observe(self, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Take in one pass that asked for `num_tokens` drafts, the longest of `num_steps`."""
        expected_s = self.seconds(num_steps, num_tokens)
        if expected_s > 0:
            seconds = min(seconds, 4.0 * expected_s)
        size = np.array([num_steps, num_tokens], dtype=np.float64)
        self._moments = self._FADE * self._moments + np.outer(size, size)
        self._products = self._FADE * self._products + size * seconds
        self._fit()

    def seconds(self, num_steps: int, num_tokens: int) -> float:
        """Expected seconds for drafts of this size; 0 before any was observed."""
        return self.per_step_s * num_steps + self.per_token_s * num_tokens

    def _fit(self) -> None:
        doubt = np.diag([1e-6, self._TOKEN_DOUBT]) * np.diag(self._moments)
        per_step_s, per_token_s = np.linalg.solve(self._moments + doubt, self._products)
        if per_token_s < 0:
            per_step_s, per_token_s = self._products[0] / self._moments[0, 0], 0.0
        elif per_step_s < 0:
            per_step_s, per_token_s = 0.0, self._products[1] / self._moments[1, 1]
        self.per_step_s, self.per_token_s = float(per_step_s), float(per_token_s)

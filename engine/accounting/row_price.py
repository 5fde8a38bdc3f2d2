"""The least chance of acceptance that makes a draft worth its row, for drafts with a known chance.

A text match knows the acceptance of similar tokens, token by token. Lengths planned by a class's mean do not use it: at
eight streams most of a chat's matches do not pay, but the few long ones do.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from engine.accounting.acceptance import Floats

_FADE = 0.95  # per pass


class RowPrice:
    """The tokens that could be decoded in the time of one row, at the speed of recent passes.

    Exactly the drafts with a chance above this price raise the tokens per second (Dinkelbach's condition for the
    largest ratio, with the speed of recent passes as the estimate for the next pass).
    """

    def __init__(self) -> None:
        self._sequences = self._drafts = self._accepted = 0.0  # decayed sums over passes

    def observe(self, num_sequences: int, num_drafts: int, num_accepted: int) -> None:
        """Record one pass: the sequences with priced drafts, their drafts, and their accepted drafts."""
        self._sequences = _FADE * self._sequences + num_sequences
        self._drafts = _FADE * self._drafts + num_drafts
        self._accepted = _FADE * self._accepted + num_accepted

    def of(self, num_sequences: int, num_priced: int, row_seconds: Floats) -> float:
        """Return the price in a pass of `num_sequences`, `num_priced` of them with priced drafts; at most 1.

        `row_seconds [M + 1]` has the seconds of the pass with 0 to M drafts. Costs rise in steps, so the cost of a row
        is a mean: over one row per sequence, or over twice the recent number of priced drafts if that is more.
        """
        if len(row_seconds) < 2:
            return 1.0
        num_drafts, _ = self._expected(num_priced)
        reach = min(max(num_sequences, ceil(2.0 * num_drafts)), len(row_seconds) - 1)
        row_s = float(row_seconds[reach] - row_seconds[0]) / reach
        return min(1.0, self.tokens_per_s(num_sequences, num_priced, row_seconds) * row_s)

    def tokens_per_s(self, num_sequences: int, num_priced: int, row_seconds: Floats) -> float:
        """Return the speed of such a pass, if the number and the acceptance of drafts stay as in recent passes."""
        num_drafts, num_accepted = self._expected(num_priced)
        return (num_sequences + num_accepted) / float(np.interp(num_drafts, range(len(row_seconds)), row_seconds))

    def _expected(self, num_priced: int) -> tuple[float, float]:
        """Return the expected drafts of `num_priced` sequences, and their expected accepted drafts."""
        share = num_priced / self._sequences if self._sequences else 0.0
        return share * self._drafts, share * self._accepted

"""The chance at which one more draft is worth its row, for drafts that tell how likely they stand before they are made.

A text match knows, token by token, how often tokens like it have stood. Lengths that are planned by the mean of a class
cannot see that: of a chat's matches most do not pay at eight streams, and the few long ones do.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from engine.proposer.adaptive.acceptance import Floats

_FADE = 0.95  # per pass


class RowPrice:
    """Tokens that a row's time would bring otherwise, at the speed of recent passes.

    Drafts whose chance is above it raise the tokens per second, and no others do (Dinkelbach's condition for the
    largest ratio, with the speed of the last passes for that of the next).
    """

    def __init__(self) -> None:
        self._sequences = self._drafts = self._accepted = 0.0  # decayed sums over passes

    def observe(self, num_sequences: int, num_drafts: int, num_accepted: int) -> None:
        """Take in one pass: sequences whose drafts are priced, these drafts, and those of them that stood."""
        self._sequences = _FADE * self._sequences + num_sequences
        self._drafts = _FADE * self._drafts + num_drafts
        self._accepted = _FADE * self._accepted + num_accepted

    def of(self, num_sequences: int, num_priced: int, row_seconds: Floats) -> float:
        """Return the price in a pass of `num_sequences`, of which `num_priced` have such drafts; at most 1.

        `row_seconds` `[M + 1]` are those of the pass with 0 to M drafts. What a row costs is the mean over as many rows
        as there are sequences, or twice as many as such drafts took lately: costs rise in steps.
        """
        if len(row_seconds) < 2:
            return 1.0
        num_drafts, _ = self._expected(num_priced)
        reach = min(max(num_sequences, ceil(2.0 * num_drafts)), len(row_seconds) - 1)
        row_s = float(row_seconds[reach] - row_seconds[0]) / reach
        return min(1.0, self.tokens_per_s(num_sequences, num_priced, row_seconds) * row_s)

    def tokens_per_s(self, num_sequences: int, num_priced: int, row_seconds: Floats) -> float:
        """Return the speed of such a pass if its drafts are as many and as good as lately."""
        num_drafts, num_accepted = self._expected(num_priced)
        return (num_sequences + num_accepted) / float(np.interp(num_drafts, range(len(row_seconds)), row_seconds))

    def _expected(self, num_priced: int) -> tuple[float, float]:
        """Return the drafts of so many sequences, and those of them that stand."""
        share = num_priced / self._sequences if self._sequences else 0.0
        return share * self._drafts, share * self._accepted

"""The draft lengths that give the most expected tokens per second, and the price of a row.

The price decides on drafts whose own chance of acceptance is known, such as text matches. A length planned from the
class's mean ignores that chance: at eight streams most of a chat's matches do not pay, but the few long ones do.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf

import numpy as np

from engine.accounting.cost_model import RowSeconds
from engine.accounting.draft_cost import DraftPrices

_FADE = 0.95  # per pass, of the passes that set the price of a row
_NEAR = 0.99  # of the best goodput: among lengths above this, the shortest pass is chosen


@dataclass(frozen=True, slots=True)
class Allocation:
    """The drafts per sequence, `lengths [B]`, and the expected tokens per second with and without them.

    Attributes:
        seconds: of the pass and its drafts.
        least_tokens: the fewest tokens that a sequence is expected to get.
    """

    lengths: list[int]
    tokens_per_s: float
    plain_tokens_per_s: float
    seconds: float
    least_tokens: float

    @classmethod
    def plain(cls, num_sequences: int, seconds: float) -> Allocation:
        """Return no drafts, for a pass of this length."""
        speed = num_sequences / seconds
        return cls([0] * num_sequences, speed, speed, seconds, 1.0)


def allocate(
    acceptance: Seq[Seq[float]],
    row_seconds: RowSeconds,
    prices: DraftPrices,
    max_seconds: float = inf,
    num_steps: Seq[float] | None = None,
) -> Allocation:
    """Maximise G = (B + sum of acceptance) / (C(B + drafts) + D(drafts)) over all lengths.

    For a given number of drafts and a given longest draft, the drafts with the largest acceptance are best
    (arXiv:2406.14066), and they form a prefix per sequence: of a chain, or of a tree's nodes, likeliest first. So every
    longest length and every number is tried, for any shape of C. Among lengths that are nearly the best, the shortest
    pass is chosen: clients wait less, and an estimate for few drafts is more certain.

    Args:
        acceptance: `[B][K]`, falling along K; 0 for a draft that is not allowed.
        row_seconds: C(B) to C(B + M), where M is the largest number of drafts.
        prices: D.
        max_seconds: Upper limit of C + D.
        num_steps: `[K]`, the steps of a draft model for a longest draft of 1 to K; by default as many as drafts.
    """
    steps = range(1, len(acceptance[0]) + 1) if num_steps is None else num_steps
    if len(acceptance) == 1:
        draft_s = [prices.seconds(number, tokens) for tokens, number in enumerate(steps, 1)]
        return _allocate_to_one(acceptance[0], row_seconds, draft_s, max_seconds)
    return _allocate_to_several(acceptance, row_seconds, prices, max_seconds, np.array(steps))


def _allocate_to_several(
    acceptance: Seq[Seq[float]], row_seconds: RowSeconds, prices: DraftPrices, max_seconds: float, num_steps: np.ndarray
) -> Allocation:
    """Allocate to two sequences or more."""
    num_sequences, num_positions = len(acceptance), len(acceptance[0])
    without = Allocation.plain(num_sequences, float(row_seconds.at(0, num_sequences)))
    plain = without.tokens_per_s
    # Order all drafts by acceptance; equal ones by position, so that lengths stay prefixes.
    by_position = np.array(acceptance).T.ravel()
    order = np.argsort(-by_position, kind="stable")
    chances = by_position[order]
    max_drafts = min(len(row_seconds.alone) - 1, int((chances > 0).sum()))
    if max_drafts == 0:
        return without
    # Compute the goodput of every longest length (rows) with every number of drafts (columns).
    depths = order // num_sequences + 1  # [B * K]
    longest = np.arange(1, num_positions + 1)[:, None]  # [K, 1]
    is_in = (depths <= longest) & (chances > 0)  # [K, B * K]
    wanted = np.cumsum(is_in, axis=1)
    num_drafts = np.minimum(wanted, len(row_seconds.alone) - 1)
    tokens = num_sequences + np.cumsum(is_in * chances, axis=1)
    draft_s = prices.request_s + prices.step_s * num_steps[:, None] + prices.token_s * num_drafts
    seconds = row_seconds.at(num_drafts, tokens) + draft_s
    goodput = np.where((seconds <= max_seconds) & (wanted == num_drafts), tokens / seconds, 0.0)
    if (best := goodput.max()) <= plain:
        return without
    # Choose the shortest pass among the nearly best ones.
    is_near = goodput >= max(_NEAR * best, np.nextafter(plain, np.inf))
    best_longest, best_last = np.unravel_index(int(np.where(is_near, seconds, np.inf).argmin()), goodput.shape)
    is_chosen = is_in[best_longest, : best_last + 1]
    chosen = order[: best_last + 1][is_chosen] % num_sequences
    gained = np.bincount(chosen, chances[: best_last + 1][is_chosen], num_sequences)
    return Allocation(
        lengths=np.bincount(chosen, minlength=num_sequences).tolist(),
        tokens_per_s=float(goodput[best_longest, best_last]),
        plain_tokens_per_s=plain,
        seconds=float(seconds[best_longest, best_last]),
        least_tokens=1.0 + float(gained.min()),
    )


def _allocate_to_one(
    acceptance: Seq[float], row_seconds: RowSeconds, draft_s: Seq[float], max_seconds: float
) -> Allocation:
    """Allocate to a single sequence; a short loop is faster than arrays."""
    most = min(len(acceptance), len(row_seconds.alone) - 1)
    target_s = row_seconds.at(np.arange(most + 1), np.cumsum([1.0, *acceptance[:most]])).tolist()
    without, tokens = Allocation.plain(1, target_s[0]), 1.0
    goodputs = []
    for chance, seconds, own_s in zip(acceptance, target_s[1:], draft_s, strict=False):
        if chance <= 0.0:
            break
        tokens += chance
        pass_s = seconds + own_s
        goodputs.append(tokens / pass_s if pass_s <= max_seconds else 0.0)
    plain = without.tokens_per_s
    if not goodputs or (best := max(goodputs)) <= plain:
        return without
    length, goodput = next((i, each) for i, each in enumerate(goodputs, 1) if each >= _NEAR * best and each > plain)
    tokens = 1.0 + sum(acceptance[:length])
    return Allocation([length], goodput, plain, tokens / goodput, tokens)


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

    def of(self, num_sequences: int, num_priced: int, row_seconds: Seq[float]) -> float:
        """Return the price in a pass of `num_sequences`, `num_priced` of them with priced drafts; at most 1.

        `row_seconds [M + 1]` has the seconds of the pass with 0 to M drafts. Costs rise in steps, so the cost of a row
        is a mean: over one row per sequence, or over twice the recent number of priced drafts if that is more.
        """
        if len(row_seconds) < 2:
            return 1.0
        num_drafts, _ = self._expected(num_priced)
        reach = min(max(num_sequences, ceil(2.0 * num_drafts)), len(row_seconds) - 1)
        row_s = (row_seconds[reach] - row_seconds[0]) / reach
        return min(1.0, self.tokens_per_s(num_sequences, num_priced, row_seconds) * row_s)

    def each(self, num_sequences: int, num_priced: int, row_seconds: Seq[float]) -> list[float]:
        """Return the prices of a sequence's first, second, ... row; the last one is for all later rows.

        Sequences that share a pass have one price. A single one has the cost of each of its rows: its first row may be
        dear, and the next ones free.
        """
        if num_sequences > 1 or len(row_seconds) < 2:
            return [self.of(num_sequences, num_priced, row_seconds)]
        speed = self.tokens_per_s(num_sequences, num_priced, row_seconds)
        return [speed * (more_s - less_s) for less_s, more_s in pairwise(row_seconds)]

    def tokens_per_s(self, num_sequences: int, num_priced: int, row_seconds: Seq[float]) -> float:
        """Return the speed of such a pass, if the number and the acceptance of drafts stay as in recent passes."""
        num_drafts, num_accepted = self._expected(num_priced)
        last = len(row_seconds) - 1
        below = min(int(num_drafts), last)
        above_s = row_seconds[min(below + 1, last)]
        pass_s = row_seconds[below] + (num_drafts - below) * (above_s - row_seconds[below])
        return (num_sequences + num_accepted) / pass_s

    def _expected(self, num_priced: int) -> tuple[float, float]:
        """Return the expected drafts of `num_priced` sequences, and their expected accepted drafts."""
        share = num_priced / self._sequences if self._sequences else 0.0
        return share * self._drafts, share * self._accepted

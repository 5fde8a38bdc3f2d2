"""A stretch of one sequence, as the model runner computes it; it knows neither requests nor drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from engine.draft import depths


class Span(NamedTuple):
    """Consecutive tokens of one sequence, computed in one pass.

    A KV index counts the slots of one sequence. The tokens have KV indices [start, start + len(token_ids)), whose slots
    the table covers. The KV of [0, start) is already in the blocks of `block_table`, or is written there by another
    span of the same pass. The last
    `num_logits` tokens yield a row of logits each. A tuple, since a step makes hundreds of them.

    The KV index of a token is its position, except in a tree: `parents` belong to the last `len(parents)` KV indices of
    the span, as in `engine.draft.Draft`. Such a token sees its ancestors, and everything before the tree; its position
    is its depth after that. The tree may begin before the span does.
    """

    token_ids: Seq[int]  # at least one
    start: int
    block_table: Seq[int]  # block of KV index i: block_table[i // P]; may be longer than needed
    num_logits: int
    parents: Seq[int] = ()

    @property
    def end(self) -> int:
        """First KV index after the span: the number of tokens the last token of a chain attends to."""
        return self.start + len(self.token_ids)

    @property
    def tree_start(self) -> int:
        """KV index of the tree's first node; the end if there is no tree."""
        return self.end - len(self.parents)

    @property
    def num_chained(self) -> int:
        """Tokens that come before the tree."""
        return max(0, min(len(self.token_ids), self.tree_start - self.start))

    @property
    def positions(self) -> Seq[int]:
        """Position of each token."""
        if not self.parents:
            return range(self.start, self.end)
        first = self.tree_start
        positions = [*range(self.start, first), *(first + depth - 1 for depth in depths(self.parents))]
        return positions[-len(self.token_ids) :]

    @property
    def num_positions(self) -> int:
        """One more than the largest position."""
        return max(self.positions) + 1 if self.parents else self.end

    def at_step(self, step: int) -> Span:
        """Return the span of its token `step` alone, those before it being in the pool already."""
        num_later = len(self.token_ids) - 1 - step
        parents = self.parents[: max(0, len(self.parents) - num_later)]
        return self._replace(token_ids=self.token_ids[step : step + 1], start=self.start + step, parents=parents)

    def trimmed(self, block_size: int) -> Span:
        """Return the span without blocks behind its last token."""
        num_blocks = -(-self.end // block_size)
        return self if len(self.block_table) == num_blocks else self._replace(block_table=self.block_table[:num_blocks])

    def first_key(self, window: int | None) -> int:
        """Return the first KV index that the tokens may see, if each sees `window` positions, its own included."""
        if window is None:
            return 0
        first_position = min(self.positions) if self.parents else self.start
        return max(0, min(first_position - window + 1, self.tree_start))

"""A range of one sequence's tokens that the model runner computes; it knows no requests and no drafts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from engine.batch.draft import depths


class SpanStates(NamedTuple):
    """Slots of recurrent layers' states: the state before a span, and the states to keep, by rows computed by then."""

    before: int
    after: Mapping[int, int]

    def at_row(self, row: int) -> SpanStates:
        """Return the slots of one row of the span; the state before it is kept."""
        slot = self.after.get(row + 1)
        return SpanStates(self.after[row] if row else self.before, {} if slot is None else {1: slot})


class Span(NamedTuple):
    """Consecutive tokens of one sequence, computed in one pass.

    A KV index counts the slots of one sequence. The tokens have KV indices [start, start + len(token_ids)), and
    `block_table` covers their slots. The KV of [0, start) is already in its blocks, or another span of the same pass
    writes it. Each of the last `num_logits` tokens yields a row of logits. A tuple, since a step makes hundreds.

    The KV index of a token is its position, except in a tree: `parents`, as in `Draft`, belong to the
    span's last `len(parents)` KV indices. A token of a tree attends to its ancestors and to everything before the tree;
    its position follows from its depth. The tree may begin before the span.
    """

    token_ids: Seq[int]  # at least one
    start: int
    block_table: Seq[int]  # block of KV index i: block_table[i // P]; may be longer than needed
    num_logits: int
    parents: Seq[int] = ()
    states: SpanStates | None = None  # of models with recurrent layers

    @property
    def end(self) -> int:
        """The first KV index after the span: in a chain, the number of tokens that its last token attends to."""
        return self.start + len(self.token_ids)

    @property
    def tree_start(self) -> int:
        """The KV index of the tree's first node; the span's end if it has no tree."""
        return self.end - len(self.parents)

    @property
    def num_chained(self) -> int:
        """The number of tokens before the tree."""
        return max(0, min(len(self.token_ids), self.tree_start - self.start))

    @property
    def positions(self) -> Seq[int]:
        """The position of each token."""
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
        """Return the span of token `step` alone; the KV and the state of the tokens before it are in the pool."""
        num_later = len(self.token_ids) - 1 - step
        parents = self.parents[: max(0, len(self.parents) - num_later)]
        states = None if self.states is None else self.states.at_row(step)
        token_ids, num_logits = self.token_ids[step : step + 1], int(num_later < self.num_logits)
        return Span(token_ids, self.start + step, self.block_table, num_logits, parents, states)

    def with_logits(self) -> Span:
        """Return the span of the rows with logits alone; the KV of the others is in the pool."""
        return self._replace(token_ids=self.token_ids[-self.num_logits :], start=self.end - self.num_logits)

    def trimmed(self, block_size: int) -> Span:
        """Return the span without the blocks after its last token."""
        num_blocks = -(-self.end // block_size)
        return self if len(self.block_table) == num_blocks else self._replace(block_table=self.block_table[:num_blocks])

    def first_key(self, window: int | None) -> int:
        """Return the first KV index that any token attends to; each attends to `window` positions including its own."""
        if window is None:
            return 0
        first_position = min(self.positions) if self.parents else self.start
        return max(0, min(first_position - window + 1, self.tree_start))

"""One likely outcome of a pass, and the draft that grows behind it in blocks of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.proposer.draft_model.draft_sequence import DraftSequence
from engine.proposer.growth.chain import Chain


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The block of a sequence that a branch needs a copy of, before it writes behind what it shares."""

    source_id: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Branch:
    """`after` follows the committed tokens of a sequence, whose blocks hold the KV of both but for the last token.

    A draft of `num_drafts` grows behind it; `order` is its rank among the branches of the sequence, likeliest first.
    """

    sequence: DraftSequence
    after: tuple[int, ...]
    num_drafts: int
    order: int
    block_size: int

    @property
    def start(self) -> int:
        """KV index of the last token of `after`: the first slot that the branch writes."""
        return len(self.sequence.blocks.token_ids) + len(self.after) - 1

    @property
    def num_blocks(self) -> int:
        """Blocks that its slots take, the one in which it parts from its sequence included."""
        return (self.start + self.num_drafts - 1) // self.block_size - self._first_block + 1

    def copy_into(self, block_ids: Seq[int]) -> list[BlockCopy]:
        """The start of the first block is the sequence's; nothing if the branch begins where a block does."""
        if self.start % self.block_size == 0:
            return []
        return [BlockCopy(self.sequence.blocks.block_table[self._first_block], block_ids[0])]

    def chain(self, block_ids: Seq[int]) -> Chain:
        """The branch's draft, to grow in `block_ids` behind the blocks it shares."""
        table = [*self.sequence.blocks.block_table[: self._first_block], *block_ids]
        return self.sequence.chain([*self.sequence.target_sequence.token_ids, *self.after], table, self.num_drafts)

    @property
    def _first_block(self) -> int:
        return self.start // self.block_size

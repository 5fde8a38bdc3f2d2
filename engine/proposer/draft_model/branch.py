"""One likely outcome of a pass, and the draft that grows after it in separate blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.proposer.draft_model.draft_sequence import DraftSequence
from engine.proposer.growth.chain import Chain


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block of a sequence to copy into a branch, which then writes the rest of the block."""

    source_id: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A likely outcome, `after`, which follows the committed tokens of a sequence.

    The sequence's blocks hold the KV of both, without the last token. A draft of `num_drafts` tokens grows after it.
    `order` is the branch's rank in its sequence, likeliest first.
    """

    sequence: DraftSequence
    after: tuple[int, ...]
    num_drafts: int
    order: int
    block_size: int

    @property
    def start(self) -> int:
        """The KV index of the last token of `after`, which is the first slot that the branch writes."""
        return len(self.sequence.blocks.token_ids) + len(self.after) - 1

    @property
    def num_blocks(self) -> int:
        """The number of the branch's own blocks, including the copied one."""
        return (self.start + self.num_drafts - 1) // self.block_size - self._first_block + 1

    def copy_into(self, block_ids: Seq[int]) -> list[BlockCopy]:
        """Return the copy of the sequence's last shared block; empty if the branch begins with a new block."""
        if self.start % self.block_size == 0:
            return []
        return [BlockCopy(self.sequence.blocks.block_table[self._first_block], block_ids[0])]

    def chain(self, block_ids: Seq[int]) -> Chain:
        """Return the branch's draft, which grows in `block_ids` after the shared blocks."""
        table = [*self.sequence.blocks.block_table[: self._first_block], *block_ids]
        return self.sequence.chain([*self.sequence.target_sequence.token_ids, *self.after], table, self.num_drafts)

    @property
    def _first_block(self) -> int:
        return self.start // self.block_size

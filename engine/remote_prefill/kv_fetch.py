"""The state of one order for KV blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.remote_prefill.kv_transfer import KVChunk
from engine.sequence.sequence import Sequence


@dataclass(slots=True)
class KVFetch:
    """Blocks [next_block, end_block) of `sequence` are ordered and have not arrived.

    `followers` lack the same blocks and adopt them from the prefix cache as they arrive. Blocks that arrive after
    `deadline_s` are not used. The deadline is `timeout_s` after the order, and earlier until a replica accepts it.
    """

    fetch_id: int
    sequence: Sequence
    next_block: int
    end_block: int
    began_s: float
    timeout_s: float
    deadline_s: float
    followers: list[Sequence] = field(default_factory=list)

    @property
    def num_missing_blocks(self) -> int:
        return self.end_block - self.next_block

    def mistake(self, chunk: KVChunk, bytes_per_block: int, bytes_per_state: int) -> str | None:
        """Describe why `chunk` is not the next blocks of this fetch; None if it is."""
        if chunk.header.first_block != self.next_block:
            return f"received block {chunk.header.first_block}, expected block {self.next_block}"
        if not 0 < len(chunk.blocks) <= self.num_missing_blocks:
            return f"received {len(chunk.blocks)} blocks, but only {self.num_missing_blocks} were missing"
        if chunk.blocks.shape[1:] != (bytes_per_block,):
            return f"received blocks of shape {tuple(chunk.blocks.shape[1:])}, expected {bytes_per_block} bytes each"
        if chunk.state is not None and chunk.state.shape != (bytes_per_state,):
            return f"received a state of shape {tuple(chunk.state.shape)}, expected {bytes_per_state} bytes"
        return None

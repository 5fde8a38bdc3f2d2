"""The state of one order for KV blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.remote_prefill.kv_transfer import KVChunk
from engine.sequence.sequence import Sequence


@dataclass(slots=True)
class KVFetch:
    """Blocks [next_block, end_block) of `sequence` are ordered and have not arrived.

    `followers` are sequences that lack the same blocks; they adopt them from the prefix cache as these arrive. Blocks
    that come after `deadline_s` are not used: `timeout_s` after the order left, or sooner while no replica accepts it.
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

    def mistake(self, chunk: KVChunk, bytes_per_block: int) -> str | None:
        """Describe what keeps `chunk` from being the next blocks of this fetch; None where it is."""
        if chunk.header.first_block != self.next_block:
            return f"block {chunk.header.first_block} came where {self.next_block} was next"
        if not 0 < len(chunk.blocks) <= self.num_missing_blocks:
            return f"{len(chunk.blocks)} blocks came where {self.num_missing_blocks} were missing"
        if chunk.blocks.shape[1:] != (bytes_per_block,):
            return f"blocks of shape {tuple(chunk.blocks.shape[1:])} came, and ours have {bytes_per_block} bytes"
        return None

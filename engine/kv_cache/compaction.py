"""Compaction of a tree: the accepted path moves to the KV indices that a chain would have had."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVMove:
    """KV of one sequence that moves, all at once: it is read at `from_indices` before any of it is written."""

    block_table: Seq[int]
    from_indices: Seq[int]
    to_indices: Seq[int]

    def slot(self, kv_index: int, block_size: int) -> int:
        """Return the pool's slot of a KV index."""
        return self.block_table[kv_index // block_size] * block_size + kv_index % block_size


def compaction(block_table: Seq[int], tree_start: int, path: Seq[int]) -> KVMove | None:
    """What brings the nodes of `path`, whose tree lies from `tree_start` on, to its beginning; None if they are there.

    Nodes that are where they belong stay.
    """
    misplaced = [(node, depth) for depth, node in enumerate(path) if node != depth]
    if not misplaced:
        return None
    from_indices = [tree_start + node for node, _ in misplaced]
    return KVMove(tuple(block_table), from_indices, [tree_start + depth for _, depth in misplaced])

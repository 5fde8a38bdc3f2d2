"""Compaction of a tree: the accepted path moves to the slots of a chain."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVMove:
    """A simultaneous move of one sequence's KV: all sources are read before any target is written.

    Attributes:
        block_table: the sequence's blocks.
        from_indices: sources, counted from the sequence's first slot.
        to_indices: one target per source.
    """

    block_table: Seq[int]
    from_indices: Seq[int]
    to_indices: Seq[int]

    def slot(self, kv_index: int, block_size: int) -> int:
        """Return the pool's slot of a KV index."""
        return self.block_table[kv_index // block_size] * block_size + kv_index % block_size


def compaction(block_table: Seq[int], tree_start: int, path: Seq[int]) -> KVMove | None:
    """Return the move that turns the nodes of `path` into a chain at `tree_start`; None if they already are one.

    The tree's nodes are stored from KV index `tree_start` on. Nodes in their final place do not move.
    """
    misplaced = [(node, depth) for depth, node in enumerate(path) if node != depth]
    if not misplaced:
        return None
    sources = [tree_start + node for node, _ in misplaced]
    return KVMove(tuple(block_table), sources, [tree_start + depth for _, depth in misplaced])

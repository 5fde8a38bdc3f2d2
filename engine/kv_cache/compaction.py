"""Compaction of a tree: the accepted path goes to the places where a chain would have had it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVMove:
    """KV of one sequence that changes places, all at once: it is read at `from_places` before any of it is written."""

    block_table: Seq[int]
    from_places: Seq[int]
    to_places: Seq[int]

    def slot(self, place: int, block_size: int) -> int:
        """The pool's slot of a place."""
        return self.block_table[place // block_size] * block_size + place % block_size


def compaction(block_table: Seq[int], tree_start: int, path: Seq[int]) -> KVMove | None:
    """What brings the nodes of `path`, whose tree lies from `tree_start` on, to its beginning; None if they are there.

    Nodes that are where they belong stay.
    """
    misplaced = [(node, depth) for depth, node in enumerate(path) if node != depth]
    if not misplaced:
        return None
    from_places = [tree_start + node for node, _ in misplaced]
    return KVMove(tuple(block_table), from_places, [tree_start + depth for _, depth in misplaced])

"""The shapes of drafts: sizes, the limits of each sequence, and the acceptance and depth that passes have shown."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.accounting.acceptance import AcceptanceTable, Floats, Ints
from engine.accounting.record import SequencePass
from engine.accounting.speculation_gate import class_of
from engine.batch.draft import depths
from engine.sequence.sequence import Sequence

_DEPTH_RATE = 0.1  # of a pass in the depth of trees

Bools = NDArray[np.bool_]
Names = NDArray[np.str_]


class DraftSize(NamedTuple):
    """The size of a draft: the length of a chain, or the depth and the nodes of a tree."""

    num_tokens: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """The longest chain and the largest tree of each sequence, `[B]`; 0 where a sequence cannot have the shape."""

    chains: Ints
    trees: Ints
    depths: Ints

    @classmethod
    def of(cls, sequences: Seq[Sequence], num_possible: Callable[[Sequence, bool], int]) -> ShapeLimits:
        """Return the limits of sequences, by `num_possible(sequence, is_tree)`."""
        chains = [num_possible(each, False) for each in sequences]
        trees = [num_possible(each, True) if each.num_tree_nodes else 0 for each in sequences]
        return cls(np.array(chains), np.array(trees), np.array([each.num_draft_tokens for each in sequences]))

    @property
    def no_trees(self) -> Bools:
        return np.zeros(len(self.chains), dtype=np.bool_)

    def are_trees(self, names: Names, classes: set[str]) -> Bools:
        """Return which sequences have trees if these classes have."""
        return np.array([name in classes for name in names.tolist()]) & (self.trees > 0)

    def sizes(self, lengths: Ints, is_tree: Bools) -> list[DraftSize]:
        """Return drafts of these numbers of rows within the limits; a tree of one node is a chain."""
        branches = is_tree & (lengths > 1)
        nodes = np.where(branches, np.minimum(lengths, self.trees), 0)
        depths = np.minimum(np.where(branches, nodes, lengths), np.where(branches, self.depths, self.chains))
        return [*map(DraftSize, depths.tolist(), nodes.tolist())]


class ShapeRates:
    """The acceptance of chains and of trees in past passes, and the depth of trees.

    Attributes:
        chains, trees: the acceptance of drafts by position, and of nodes.
        tree_steps: the expected depth of a tree of 1, 2, ... nodes: the steps of its draft model. At first it is full.
    """

    def __init__(self, max_length: int, max_nodes: int) -> None:
        self.chains = AcceptanceTable(max_length)
        self.trees = AcceptanceTable(max_nodes, has_trees=True)
        self.tree_steps: Floats = np.array(
            [float(size.bit_length()) for size in range(1, max(max_length, max_nodes) + 1)]
        )

    def knows(self, request_id: str) -> bool:
        """True if a request has had drafts."""
        return self.chains.knows(request_id) or self.trees.knows(request_id)

    def keep_only(self, request_ids: Seq[str]) -> None:
        """Forget all other requests."""
        self.chains.keep_only(request_ids)
        self.trees.keep_only(request_ids)

    def learn(self, passes: Seq[SequencePass]) -> None:
        """Learn from one pass. A chain that came where a tree was requested is what such a request yields."""
        passes = [each for each in passes if each.num_proposed]
        if chains := [each for each in passes if not each.wants_tree]:
            self.chains.observe(*_columns(chains), [each.num_accepted for each in chains])
        if trees := [each for each in passes if each.wants_tree]:
            self._learn_depth(trees)
            paths = [each.outcome.path or range(each.num_accepted) for each in trees]
            self.trees.observe_trees(*_columns(trees), paths)

    def _learn_depth(self, passes: Seq[SequencePass]) -> None:
        """Learn the depth of trees by their number of nodes: the first nodes of a tree are the best smaller one."""
        deepest = np.zeros(max(each.num_proposed for each in passes))
        for each in passes:
            parents = each.draft.draft.parents or range(-1, each.num_proposed - 1)
            by_node = np.maximum.accumulate(depths(parents))
            deepest[: len(by_node)] = np.maximum(deepest[: len(by_node)], by_node)
        deepest = np.maximum.accumulate(deepest)[: len(self.tree_steps)]
        self.tree_steps[: len(deepest)] += _DEPTH_RATE * (deepest - self.tree_steps[: len(deepest)])
        self.tree_steps = np.maximum.accumulate(self.tree_steps)


def _columns(passes: Seq[SequencePass]) -> tuple[list[str], list[str], list[int]]:
    """Return the ids, the classes and the numbers of drafts of the sequences of a pass."""
    sequences = [each.sequence for each in passes]
    return (
        [each.request_id for each in sequences],
        [class_of(each) for each in sequences],
        [each.num_proposed for each in passes],
    )

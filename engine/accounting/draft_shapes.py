"""The shapes of drafts: sizes, the limits of each sequence, and the acceptance and depth that passes have shown."""

from __future__ import annotations

from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from engine.accounting.acceptance import AcceptanceTable
from engine.accounting.record import SequencePass
from engine.batch.draft import depths
from engine.sequence.sequence import Sequence


class DraftSize(NamedTuple):
    """The size of a draft: the length of a chain, or the depth and the nodes of a tree."""

    num_tokens: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """The longest chain and the largest tree of each sequence, `[B]`; 0 where a sequence cannot have the shape."""

    chains: list[int]
    trees: list[int]
    depths: list[int]

    @classmethod
    def of(cls, sequences: Seq[Sequence], num_possible: Callable[[Sequence, bool], int]) -> ShapeLimits:
        """Return the limits of sequences, by `num_possible(sequence, is_tree)`."""
        chains = [num_possible(each, False) for each in sequences]
        trees = [num_possible(each, True) if each.num_tree_nodes else 0 for each in sequences]
        return cls(chains, trees, [each.num_draft_tokens for each in sequences])

    def are_trees(self, names: Seq[str], classes: Container[str]) -> list[bool]:
        """Return which sequences have trees if these classes have."""
        return [size > 0 and name in classes for name, size in zip(names, self.trees, strict=True)]

    def sizes(self, lengths: Seq[int], is_tree: Seq[bool]) -> list[DraftSize]:
        """Return drafts of these numbers of rows within the limits; a tree of one node is a chain."""
        rows = zip(lengths, is_tree, self.chains, self.trees, self.depths, strict=True)
        return [
            DraftSize(min(length, tree, depth), min(length, tree))
            if branches and length > 1
            else DraftSize(min(length, chain), 0)
            for length, branches, chain, tree, depth in rows
        ]

    def equal(self, length: int) -> list[DraftSize]:
        """Return chains of one length, within the limits."""
        return [DraftSize(min(length, chain), 0) for chain in self.chains]


class ShapeRates:
    """The acceptance of chains and of trees in past passes, and the depth of trees.

    Attributes:
        chains, trees: the acceptance of drafts by position, and of nodes.
        tree_steps: the expected depth of a tree of 1, 2, ... nodes: the steps of its draft model. At first it is full.
    """

    def __init__(self, max_length: int, max_nodes: int) -> None:
        self._has_trees = max_nodes > 0
        self.chains = AcceptanceTable(max_length)
        self.trees = AcceptanceTable(max_nodes, has_trees=True)
        self.tree_steps = [float(size.bit_length()) for size in range(1, max(max_length, max_nodes) + 1)]

    def knows(self, request_id: str) -> bool:
        """True if a request has had drafts."""
        return self.chains.knows(request_id) or self.trees.knows(request_id)

    def keep_only(self, request_ids: Seq[str]) -> None:
        """Forget all other requests."""
        self.chains.keep_only(request_ids)
        self.trees.keep_only(request_ids)

    def learn(self, passes: Seq[SequencePass]) -> None:
        """Learn from one pass. A chain that came where a tree was requested is what such a request yields.

        A tree of one node is drafted as a chain: both have its outcome, or a tree that once had luck would be one node
        for ever.
        """
        chains: list[SequencePass] = []
        trees: list[SequencePass] = []
        for each in passes:
            if each.draft.draft.token_ids:
                (trees if each.wants_tree else chains).append(each)
                if self._has_trees and not each.wants_tree and each.num_proposed == 1:
                    trees.append(each)
        if chains:
            self.chains.observe(*_columns(chains), [each.outcome.num_accepted for each in chains])
        if trees:
            self._learn_depth(trees)
            paths = [each.outcome.path or range(each.num_accepted) for each in trees]
            self.trees.observe_trees(*_columns(trees), paths)

    def _learn_depth(self, passes: Seq[SequencePass]) -> None:
        """Learn the depth of trees by their number of nodes: the first nodes of a tree are the best smaller one."""
        deepest = [0] * max(each.num_proposed for each in passes)
        for each in passes:
            parents = each.draft.draft.parents or range(-1, each.num_proposed - 1)
            for node, depth in enumerate(accumulate(depths(parents), max)):
                deepest[node] = max(deepest[node], depth)
        known = zip(self.tree_steps, accumulate(deepest, max), strict=False)
        moved = [steps + 0.1 * (depth - steps) for steps, depth in known]
        self.tree_steps = [*accumulate([*moved, *self.tree_steps[len(moved) :]], max)]


def _columns(passes: Seq[SequencePass]) -> tuple[list[str], list[str], list[int]]:
    """Return the ids, the classes and the numbers of drafts of the sequences of a pass."""
    sequences = [each.scheduled.sequence for each in passes]
    return (
        [each.request_id for each in sequences],
        [each.draft_class for each in sequences],
        [len(each.draft.draft.token_ids) for each in passes],
    )

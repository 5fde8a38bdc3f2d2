"""The shape of a tree: the nodes that are likeliest to be accepted, or the same nodes in every pass.

Drafts drawn for rejection need the same shape in every pass: choosing nodes by their drawn tokens would bias the
output.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from heapq import heappop, heappush

from engine.batch.draft import depths
from engine.config import TreeConfig, TreeKind
from engine.proposer.growth.tree import Child, Shape, TreeNode
from engine.sequence.request_tokens import RequestTokens

# The acceptance of the first, second, ... child. The first is measured with the demo pair at T=1; the rest is assumed.
RANK_ACCEPTANCE = (0.60, 0.14, 0.06, 0.035, 0.02, 0.015)


class DynamicShape:
    """The nodes with the most probable paths (EAGLE-2, arXiv:2406.16858; OPT-Tree, arXiv:2406.17276).

    Merit is the log of the path's probability. A node that is not among the best now never will be, so it needs no
    children: the result is the best tree of its size, and it ends where depth no longer pays.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def num_wanted(self, node: TreeNode | None) -> int:
        return self._num_nodes

    def merit_of(self, parent: TreeNode | None, rank: int, child: Child) -> float:
        return child.log_confidence + (parent.merit if parent is not None else 0.0)


class StaticShape:
    """The nodes of `parents`, as in `Draft`. Merit is minus the index, so the nodes keep their order."""

    def __init__(self, parents: Seq[int]) -> None:
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)

    def num_wanted(self, node: TreeNode | None) -> int:
        return len(self._children.get(_index(node), ()))

    def merit_of(self, parent: TreeNode | None, rank: int, child: Child) -> float:
        return -float(self._children[_index(parent)][rank])


def _index(node: TreeNode | None) -> int:
    return -1 if node is None else -int(node.merit)


@cache
def best_parents(num_nodes: int, max_depth: int, acceptance: tuple[float, ...] = RANK_ACCEPTANCE) -> tuple[int, ...]:
    """Return the static tree with the most accepted tokens on average (Sequoia, arXiv:2402.12374).

    `acceptance[j]` is the chance that child j of a node is accepted. The value of a node is the product of the chances
    on its path, so the best tree has the `num_nodes` most valuable nodes, in the order of their value.
    """
    # Take the most valuable candidate, then add its first child and its next sibling.
    parents: list[int] = []
    candidates = [(-acceptance[0], 0, -1, 0, 1)]  # heap of (-value, tie, parent, rank, depth)
    while candidates and len(parents) < num_nodes:
        loss, _, parent, rank, depth = heappop(candidates)
        node = len(parents)
        parents.append(parent)
        if depth < max_depth:
            heappush(candidates, (loss * acceptance[0], 2 * node + 1, node, 0, depth + 1))
        if rank + 1 < len(acceptance):
            sibling = loss / acceptance[rank] * acceptance[rank + 1]
            heappush(candidates, (sibling, 2 * node + 2, parent, rank + 1, depth))
    return tuple(parents)


def trimmed(parents: Seq[int], num_nodes: int, max_depth: int) -> tuple[int, ...]:
    """Return a shape of the first `num_nodes` nodes that are not deeper than `max_depth`."""
    indices = {-1: -1}
    for node, depth in enumerate(depths(parents)):
        if depth <= max_depth and len(indices) <= num_nodes:
            indices[node] = len(indices) - 1
    return tuple(indices[parents[node]] for node in indices if node >= 0)


def shape_of(config: TreeConfig, sequence: RequestTokens, num_nodes: int, max_depth: int) -> Shape:
    """Return the shape of a pass's tree. Only drafts that are verified by matching may choose it by their tokens."""
    if config.kind is TreeKind.DYNAMIC and sequence.is_matched:
        return DynamicShape(num_nodes)
    if config.parents:
        return StaticShape(trimmed(config.parents, num_nodes, max_depth))
    return StaticShape(best_parents(num_nodes, max_depth))

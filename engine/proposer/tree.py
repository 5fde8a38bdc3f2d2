r"""A growing draft tree: it grows level by level, and each level is one pass of the draft model.

After the committed tokens:

            c a t                committed tokens
            /   \
           x     y               level 1, from the logits after the committed tokens
          / \    |
         u   v   w               level 2, from one pass over x and y; the next pass computes the best of u, v, w

The shape has the nodes that are likeliest to be accepted, or the same nodes in every pass. Drafts drawn for rejection
need the same shape in every pass: choosing nodes by their drawn tokens would bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate, islice

from torch import Tensor

from engine.accounting.acceptance import RANK_ACCEPTANCE
from engine.batch.draft import Draft, SparseDistribution
from engine.batch.span import Span
from engine.model.draft_heads.head import BlockLogits
from engine.native.library import are_finite
from engine.proposer.chain import Chain, ChainSampler, masked, row_after
from engine.sampling.grammar import GrammarMatcher
from engine.sampling.logits_row import LogitsRow
from engine.sampling.noise import Purpose, random_bits
from engine.sampling.sampler import Sampler, draft_lanes, pass_keys
from engine.sampling.sparse_distribution import WEIGHT_BITS, choose, one_hot, quantize, sparse_distributions
from engine.sequence.sequence import RequestTokens, TokenBlocks
from engine.verifier.verify_task import IMPOSSIBLE_ID


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


ROOT = -1


def _children_of(parents: Seq[int]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


@dataclass(frozen=True, slots=True)
class Child:
    """A candidate child: the log of its chance if its parent is accepted, or the distribution it was drawn from."""

    token_id: int
    log_confidence: float = 0.0
    distribution: SparseDistribution | None = None


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A child in its tree. The draft keeps the nodes with the most `merit`, which never exceeds the parent's."""

    child: Child
    parent: int
    depth: int
    merit: float


class Tree:
    """The growing draft tree of one sequence, with up to `max_nodes` nodes and a depth of at most `max_depth`.

    `sequence` and the nodes' tokens are the target's; `blocks` has the sequence in the draft model's tokens, with its
    KV. `matcher` has accepted the committed tokens.

    With `parents` it has these nodes, in this order: merit is minus the index. Otherwise it has the nodes with the most
    probable paths (EAGLE-2, arXiv:2406.16858; OPT-Tree, arXiv:2406.17276): merit is the log of the path's probability.
    A node that is not among the best now never will be, so it needs no children, and the tree ends where depth no
    longer pays.

    `level` has the nodes whose children are chosen next. The KV of the nodes follows the committed tokens in the order
    of computation, at any depth.
    """

    def __init__(
        self,
        sequence: RequestTokens,
        blocks: TokenBlocks,
        parents: Seq[int] | None,
        max_nodes: int,
        max_depth: int,
        matcher: GrammarMatcher | None,
    ) -> None:
        self.level: list[int] = [ROOT]
        self.sequence = sequence
        self.blocks = blocks
        self._matcher = matcher
        self._children = None if parents is None else _children_of(parents)
        self._max_nodes = max_nodes
        self.max_depth = max_depth
        self.is_block = False  # all its levels come from one pass
        self._nodes: list[TreeNode] = []
        self._computed: list[int] = []
        self._overflowed: list[int] = []  # nodes whose logits were not finite

    @property
    def has_overflowed(self) -> bool:
        """True if logits of a node, of the draft or not, were not finite."""
        return bool(self._overflowed)

    @property
    def num_slots(self) -> int:
        """The number of slots for the committed tokens, the computed nodes and the current level."""
        return len(self.blocks.token_ids) + len(self._computed)

    @property
    def level_parents(self) -> list[int]:
        """The parent of each node of the level: a node of the previous level, or the root."""
        return [self._nodes[node].parent for node in self.level]

    @property
    def rows(self) -> list[LogitsRow]:
        """The rows that sample the children of the level."""
        return [self._row(node) for node in self.level]

    @property
    def num_wanted(self) -> list[int]:
        """The number of children to choose for each node of the level."""
        return [self._wanted(node) for node in self.level]

    def add(self, children: Seq[Seq[Child] | None]) -> None:
        """Add children to the nodes of the level, best or first drawn first, and set the next level.

        They are None for a node whose logits are not finite.
        """
        first = len(self._nodes)
        for parent, siblings in zip(self.level, children, strict=True):
            if siblings is None:
                self._overflowed.append(parent)
                continue
            depth = 1 if parent == ROOT else self._nodes[parent].depth + 1
            for rank, child in enumerate(siblings):
                self._nodes.append(TreeNode(child, parent, depth, self._merit(parent, rank, child)))
        chosen = self._chosen()
        self.level = [node for node in chosen if node >= first and self._is_worth_growing(node)]
        self._computed += self.level

    def stop(self) -> None:
        """End the tree's growth."""
        self.level = []

    def span(self) -> Span:
        """Return the span that computes the level, with a row of logits for each node."""
        indices = {node: index for index, node in enumerate(self._computed)}
        parents = [indices.get(self._nodes[node].parent, ROOT) for node in self._computed]
        start = self.num_slots - len(self.level)
        token_ids = [self._nodes[node].child.token_id for node in self.level]
        return Span(token_ids, start, self.blocks.block_table, len(token_ids), parents)

    def draft(self) -> Draft:
        """Return a draft of the tree's best nodes, best first; if the draft model overflowed, `IMPOSSIBLE_ID` last.

        The target computes the nodes before `IMPOSSIBLE_ID` and rejects it. A tree without room for it leaves it out.
        """
        chosen = self._chosen()
        indices = {ROOT: ROOT, **{node: index for index, node in enumerate(chosen)}}
        children = [self._nodes[node].child for node in chosen]
        parents = [indices[self._nodes[node].parent] for node in chosen]
        overflowed = [node for node in self._overflowed if node in indices]
        if overflowed and len(chosen) < self._max_nodes:
            is_drawn = not self.sequence.is_matched
            children.append(Child(IMPOSSIBLE_ID, distribution=one_hot(IMPOSSIBLE_ID) if is_drawn else None))
            parents.append(indices[overflowed[0]])
        return Draft(
            tuple(child.token_id for child in children),
            tuple(child.distribution for child in children if child.distribution is not None),
            tuple(parents),
            is_block=self.is_block,
        )

    def _chosen(self) -> list[int]:
        """Return the nodes with the most merit. The sort is stable: a parent stays before a child of equal merit."""
        by_merit = sorted(range(len(self._nodes)), key=lambda node: -self._nodes[node].merit)
        return by_merit[: self._max_nodes]

    def _is_worth_growing(self, node: int) -> bool:
        return self._nodes[node].depth < self.max_depth and self._wanted(node) > 0

    def _wanted(self, node: int) -> int:
        """Return the number of children to choose for a node."""
        return self._max_nodes if self._children is None else len(self._children.get(self._place(node), ()))

    def _merit(self, parent: int, rank: int, child: Child) -> float:
        if self._children is not None:
            return -float(self._children[self._place(parent)][rank])
        return child.log_confidence + (0.0 if parent == ROOT else self._nodes[parent].merit)

    def _place(self, node: int) -> int:
        """Return a node's index among the fixed parents."""
        return ROOT if node == ROOT else -int(self._nodes[node].merit)

    def _row(self, node: int) -> LogitsRow:
        path: list[int] = []
        while node != ROOT:
            path.append(self._nodes[node].child.token_id)
            node = self._nodes[node].parent
        committed = self.sequence.token_ids
        return masked(row_after(self.sequence, committed, tuple(reversed(path))), self._matcher, len(committed))


def tree_of(
    sequence: RequestTokens, blocks: TokenBlocks, num_nodes: int, depth: int, matcher: GrammarMatcher | None
) -> Tree:
    """Return the tree of a pass, which grows to `num_nodes` nodes of at most `depth`.

    Only drafts that are verified by matching may choose a shape by their tokens; others have the same in every pass.
    """
    parents = None if sequence.is_matched else best_parents(num_nodes, depth)
    return Tree(sequence, blocks, parents, num_nodes, depth, matcher)


_NUM_BITS = 62 - WEIGHT_BITS  # of a uniform number, which is multiplied by the remaining weight
_LANES_PER_RANK = 1 << 16  # more than the depth of any draft


class TreeSampler:
    """Chooses children with the target's sampler."""

    def __init__(self) -> None:
        self._sampler = Sampler()

    def branch(self, trees: Seq[Tree], logits: Tensor) -> None:
        """Add children to every tree's level; `logits [R, V] float32` has a row for each node of the levels.

        A node whose logits are not finite gets none.
        """
        rows = [row for tree in trees for row in tree.rows]
        wanted = [number for tree in trees for number in tree.num_wanted]
        are_matched = [tree.sequence.is_matched for tree in trees for _ in tree.level]
        children = iter(self._choose(self._sampler.apply_processors(logits, rows), rows, wanted, are_matched))
        are_valid = iter(are_finite(logits).tolist())
        for tree in trees:
            tree.add([siblings if next(are_valid) else None for siblings in islice(children, len(tree.level))])

    def _choose(
        self, scores: Tensor, rows: Seq[LogitsRow], wanted: Seq[int], are_matched: Seq[bool]
    ) -> list[list[Child]]:
        """Return the children of each row, chosen for the verification of its sequence."""
        children: list[list[Child]] = [[]] * len(rows)
        for choose_children, flag in ((self._best, True), (self._drawn, False)):
            chosen = [index for index, each in enumerate(are_matched) if each is flag]
            if chosen:
                found = choose_children(scores[chosen], [rows[i] for i in chosen], [wanted[i] for i in chosen])
                for index, siblings in zip(chosen, found, strict=True):
                    children[index] = siblings
        return children

    def _best(self, scores: Tensor, rows: Seq[LogitsRow], wanted: Seq[int]) -> list[list[Child]]:
        """Return the tokens with the highest scores plus the target's noise, which the target will probably sample.

        The confidence is the softmax of the noisy scores without the temperature, since draft and target differ equally
        at every temperature. For a greedy row it is the draft's own probability.
        """
        noisy = self._sampler.perturb(scores, rows, Purpose.TARGET_GUMBEL)
        heat = [1.0 if row.sampling.is_greedy else row.sampling.temperature for row in rows]
        sharpness = noisy.new_tensor(heat)[:, None]
        log_total = (noisy * sharpness).logsumexp(dim=1, keepdim=True)
        top = noisy.topk(min(max(wanted), noisy.shape[1]))
        confidences = (top.values * sharpness - log_total).tolist()
        return [
            [Child(token_id, log) for token_id, log in zip(ids[:number], logs, strict=False) if log > float("-inf")]
            for ids, logs, number in zip(top.indices.tolist(), confidences, wanted, strict=True)
        ]

    def _drawn(self, scores: Tensor, rows: Seq[LogitsRow], wanted: Seq[int]) -> list[list[Child]]:
        """Draw up to `wanted` tokens from each row's sparse distribution without replacement.

        The first token equals the token that a chain draws. The noise is as in `Sampler.sample_sparse`, with a lane per
        draw. Nodes of one depth share it, and only one of them is ever verified.
        """
        probs, token_ids = self._sampler.probs(scores, rows).topk(min(32, scores.shape[1]))  # [R, k]; as for chains
        left = quantize(probs)
        distributions = sparse_distributions(token_ids, left)
        keys, lanes = pass_keys(rows, Purpose.DRAFT, scores.device), draft_lanes(rows, scores.device)
        children: list[list[Child]] = [[] for _ in rows]
        for rank in range(max(wanted)):
            total = left.sum(dim=1)
            uniforms = (random_bits(keys, _NUM_BITS, lanes + rank * _LANES_PER_RANK) * total) >> _NUM_BITS
            columns = choose(left, uniforms).clamp_(max=left.shape[1] - 1)[:, None]
            drawn = token_ids.gather(1, columns)[:, 0].tolist()
            for index, is_drawn in enumerate((total > 0).tolist()):
                if is_drawn and rank < wanted[index]:
                    children[index].append(Child(drawn[index], distribution=distributions[index]))
            left = left.scatter(1, columns, 0)
        return children


@dataclass(frozen=True, slots=True)
class Blocks:
    """A block for each draft, of `num_drafts` positions; their rows are in one order, block after block."""

    logits: BlockLogits
    num_drafts: Seq[int]

    def grow(self, chains: Seq[Chain], sampler: ChainSampler) -> None:
        """Choose position by position, since penalties and grammars of a row depend on the drafts before it."""
        for chain in chains:
            chain.is_block = True
        for depth in range(max(self.num_drafts, default=0)):
            growing = [row for row, num in enumerate(self.num_drafts) if depth < num]
            grown = [chains[row] for row in growing]
            before = [(*chain.row.token_ids[-2:], *chain.token_ids) for chain in grown]
            sampler.extend(grown, self._at(growing, depth, before))

    def branch(self, trees: Seq[Tree], sampler: TreeSampler) -> None:
        """Grow level by level; all nodes of a level share one position of the block."""
        for tree in trees:
            tree.is_block = True
        for depth in range(max(self.num_drafts, default=0)):
            growing = [row for row, num in enumerate(self.num_drafts) if depth < num and trees[row].level]
            if growing:
                blocks = [row for row in growing for _ in trees[row].level]
                rows = [row for index in growing for row in trees[index].rows]
                before = [(*row.token_ids[-2:], *row.draft_ids) for row in rows]
                sampler.branch([trees[row] for row in growing], self._at(blocks, depth, before))

    def _at(self, blocks: Seq[int], depth: int, before: Seq[Seq[int]]) -> Tensor:
        firsts = [0, *accumulate(self.num_drafts)]
        return self.logits([firsts[block] + depth for block in blocks], before)

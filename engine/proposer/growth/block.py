"""Drafts grown from blocks: the distributions of all their positions are known before the first token is chosen."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from engine.model.draft_heads.head import BlockLogits
from engine.proposer.growth.chain import Chain, ChainSampler
from engine.proposer.growth.tree import Tree, TreeSampler


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

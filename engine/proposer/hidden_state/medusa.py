"""Drafts by Medusa heads: one hidden state gives the distributions of all positions, so a round is one small product.

The distributions of later positions do not depend on the earlier drafts. This lowers acceptance, but stays exact: each
draft is drawn from the distribution that it carries, or sampled with the verifier's noise.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.config import TreeConfig
from engine.model.draft_heads.medusa import MedusaHeads
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.growth.chain import Chain
from engine.proposer.growth.tree import Tree
from engine.proposer.hidden_state.state_proposer import StateProposer
from engine.proposer.passed_rows import PassedRows


class MedusaProposer(StateProposer):
    """Keeps the state of each sequence's last row; a draft has at most one token per head."""

    def __init__(self, runner: ModelRunner, heads: MedusaHeads, tree: TreeConfig | None) -> None:
        super().__init__(runner, tree, heads.num_heads)
        self._heads = heads

    @torch.inference_mode()
    def learn(self, passed: Seq[PassedRows]) -> None:
        newest = [each for each in passed if each.is_newest]
        features = self._runner.features
        if newest and features is not None:
            rows = torch.tensor([each.rows[-1] for each in newest], device=features.device)
            self._states.keep(newest, features.index_select(0, rows))

    def _grow(self, chains: Seq[Chain], states: Tensor) -> None:
        """Sample head by head, since penalties and grammars of a row depend on the drafts before it."""
        logits = self._heads.logits(states, max(chain.num_left for chain in chains))  # [B, K, V]
        for depth in range(logits.shape[1]):
            growing = [row for row, chain in enumerate(chains) if chain.num_left > 0]
            if growing:
                self._chain_sampler.extend([chains[row] for row in growing], logits[growing, depth])

    def _branch(self, trees: Seq[Tree], states: Tensor) -> None:
        """Grow level by level; all nodes of a level share the distribution of one head."""
        logits = self._heads.logits(states, max(tree.max_depth for tree in trees))  # [B, K, V]
        for depth in range(logits.shape[1]):
            growing = [row for row, tree in enumerate(trees) if tree.level]
            if growing:
                of_nodes = [row for row in growing for _ in trees[row].level]
                self._tree_sampler.branch([trees[row] for row in growing], logits[of_nodes, depth])

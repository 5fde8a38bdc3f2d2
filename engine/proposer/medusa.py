"""Drafts by Medusa heads: every position's law comes from one hidden state, so a round is one small product.

The laws of later positions do not know the earlier drafts. That costs acceptance and no exactness: each draft is drawn
from the law that goes along with it, or picked by the noise that verifies it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch import ScheduledSequence
from engine.config import TreeConfig
from engine.draft import NO_DRAFT, Draft
from engine.heads.medusa import MedusaHeads
from engine.heads.passed_rows import PassedRows
from engine.model_runner import ModelRunner
from engine.proposer.chain import Chain, ChainSampler
from engine.proposer.newest_states import NewestStates
from engine.proposer.tree import Tree
from engine.proposer.tree_sampler import TreeSampler
from engine.proposer.tree_shape import shape_of
from engine.sampler import Sampler
from engine.sequence import Sequence


class MedusaProposer:
    """Implements `HeadProposer`. It has a draft for every sequence that has decoded since it was opened."""

    def __init__(self, runner: ModelRunner, heads: MedusaHeads, tree: TreeConfig | None) -> None:
        self._runner = runner
        self._heads = heads
        self._tree_config = tree
        self._states = NewestStates()
        self._chain_sampler = ChainSampler(Sampler())
        self._tree_sampler = TreeSampler(Sampler())

    def open(self, sequence: Sequence) -> None:
        self._states.open(sequence)

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Nothing to do: `learn` has brought all that a draft needs."""

    def close(self, request_id: str) -> None:
        self._states.close(request_id)

    @torch.inference_mode()
    def learn(self, passed: Seq[PassedRows]) -> None:
        newest = [each for each in passed if each.is_newest]
        features = self._runner.features
        if newest and features is not None:
            rows = torch.tensor([each.rows[-1] for each in newest], device=features.device)
            self._states.keep(newest, features.index_select(0, rows))

    @torch.inference_mode()
    def propose(self, shares: Seq[ScheduledSequence]) -> list[Draft]:
        ready = self._states.of(shares)
        if ready is None:
            return [NO_DRAFT] * len(shares)
        lengths = [min(share.max_draft_tokens, self._heads.num_heads) for share in ready.shares]
        logits = self._heads.logits(ready.states, max(lengths))  # [B, K, V]
        is_tree = [self._tree_config is not None and share.max_tree_nodes > 0 for share in ready.shares]
        chains = [_chain(s, n) for s, n, has_tree in zip(ready.shares, lengths, is_tree, strict=True) if not has_tree]
        trees = [self._tree(s, n) for s, n, has_tree in zip(ready.shares, lengths, is_tree, strict=True) if has_tree]
        self._fill_chains(chains, _rows_of(logits, is_tree, False))
        self._fill_trees(trees, _rows_of(logits, is_tree, True))
        grown: list[Chain | Tree] = [*chains, *trees]
        drafts = {each.sequence.request_id: each.draft() for each in grown}
        return [drafts.get(share.sequence.request_id, NO_DRAFT) for share in shares]

    def _fill_chains(self, chains: Seq[Chain], logits: Tensor) -> None:
        """Head by head, since penalties and grammars of a row count the drafts before it; `logits` are [B, K, V]."""
        for depth in range(logits.shape[1]):
            growing = [row for row, chain in enumerate(chains) if chain.num_left > 0]
            if growing:
                self._chain_sampler.extend([chains[row] for row in growing], logits[growing, depth])

    def _fill_trees(self, trees: Seq[Tree], logits: Tensor) -> None:
        """All nodes of a level have the law of their depth's head."""
        for depth in range(logits.shape[1]):
            growing = [row for row, tree in enumerate(trees) if tree.level]
            if growing:
                of_nodes = [row for row in growing for _ in trees[row].level]
                self._tree_sampler.branch([trees[row] for row in growing], logits[of_nodes, depth])

    def _tree(self, share: ScheduledSequence, num_drafts: int) -> Tree:
        assert self._tree_config is not None, "without one there are chains"
        shape = shape_of(self._tree_config, share.sequence, share.max_tree_nodes, num_drafts)
        return Tree(share.sequence, shape, share.max_tree_nodes, num_drafts)


def _chain(share: ScheduledSequence, num_drafts: int) -> Chain:
    sequence = share.sequence
    return Chain(sequence, sequence.token_ids, sequence.block_table, num_drafts)


def _rows_of(logits: Tensor, flags: Seq[bool], flag: bool) -> Tensor:
    """The rows whose flag is `flag`; `logits` themselves where that is all of them."""
    rows = [row for row, each in enumerate(flags) if each is flag]
    return logits if len(rows) == len(flags) else logits[rows]

"""Drafts by the target's own weights on the target's own KV blocks: no prefill, and no state."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch.draft import NO_DRAFT, Draft
from engine.batch.span import Span
from engine.config import TreeConfig
from engine.model.draft_heads.self_draft import SelfDraft
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.growth.chain import Chain, ChainSampler, next_steps
from engine.proposer.growth.tree import Tree
from engine.proposer.growth.tree_sampler import TreeSampler
from engine.proposer.growth.tree_shape import shape_of
from engine.sampling.sampler import Sampler
from engine.sequence.checked_draft import DraftQuery
from engine.sequence.request_tokens import RequestTokens


class SelfProposer:
    """Implements `Proposer`. A draft begins with the last committed token, whose KV the target has not computed.

    All slots that it writes are reserved for the pass that verifies the draft, which writes them again.
    """

    def __init__(self, runner: ModelRunner, draft: SelfDraft, tree: TreeConfig | None) -> None:
        """Without a `tree` all drafts are chains."""
        self._runner = runner
        self._draft = draft
        self._tree_config = tree
        self._chain_sampler = ChainSampler(Sampler())
        self._tree_sampler = TreeSampler(Sampler())

    def open(self, sequence: RequestTokens) -> None:
        """Do nothing: the target prefills the prompt."""

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Do nothing: the committed tokens are in the target's blocks."""

    def close(self, request_id: str) -> None:
        """Do nothing."""

    @torch.inference_mode()
    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Grow all drafts together."""
        ready = [query for query in queries if query.sequence.num_uncomputed_tokens == 1]
        has_tree = [self._tree_config is not None and query.max_tree_nodes > 0 for query in ready]
        chains = [_chain(query) for query, flag in zip(ready, has_tree, strict=True) if not flag]
        trees = [self._tree(query) for query, flag in zip(ready, has_tree, strict=True) if flag]
        self._grow(chains)
        self._branch(trees)
        grown: list[Chain | Tree] = [*chains, *trees]
        drafts = {each.sequence.request_id: each.draft() for each in grown}
        return [drafts.get(query.sequence.request_id, NO_DRAFT) for query in queries]

    def _grow(self, chains: Seq[Chain]) -> None:
        while chains := [chain for chain in chains if chain.num_left > 0]:
            token_ids = torch.tensor([chain.last_id for chain in chains])
            for step in self._runner.plan_steps(next_steps(chains)):
                step.input_ids.copy_(token_ids)
                token_ids = self._chain_sampler.extend(chains, self._draft.logits(step))

    def _branch(self, trees: Seq[Tree]) -> None:
        """Grow level by level. Dropped nodes take slots too; a tree without free slots ends."""
        spans = [_root(tree.sequence) for tree in trees]
        while spans:
            self._tree_sampler.branch(trees, self._logits(spans))
            for tree in trees:
                if tree.num_slots > len(tree.blocks.block_table) * self._runner.block_size:
                    tree.stop()
            trees = [tree for tree in trees if tree.level]
            spans = [tree.span() for tree in trees]

    def _logits(self, spans: Seq[Span]) -> Tensor:
        return self._draft.logits(self._runner.lay_out(spans))

    def _tree(self, query: DraftQuery) -> Tree:
        assert self._tree_config is not None, "only a configured tree can be grown"
        sequence, depth = query.sequence, query.max_draft_tokens
        shape = shape_of(self._tree_config, sequence, query.max_tree_nodes, depth)
        return Tree(sequence, sequence, shape, query.max_tree_nodes, depth, sequence.matcher)


def _chain(query: DraftQuery) -> Chain:
    sequence = query.sequence
    return Chain(sequence, sequence.token_ids, sequence.block_table, query.max_draft_tokens, matcher=sequence.matcher)


def _root(sequence: RequestTokens) -> Span:
    return Span(sequence.token_ids[-1:], len(sequence.token_ids) - 1, sequence.block_table, 1)

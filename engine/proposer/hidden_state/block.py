"""Drafts by a head that gives the distributions of all positions in one pass.

The distributions of later positions depend on the earlier drafts little or not at all. This lowers acceptance, but
stays exact: each draft is drawn from the distribution that it carries, or sampled with the verifier's noise.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.batch.span import Span
from engine.config import TreeConfig
from engine.model.draft_heads.head import BlockHead
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.growth.block import Blocks
from engine.proposer.growth.chain import Chain
from engine.proposer.growth.tree import Tree
from engine.proposer.hidden_state.state_proposer import StateProposer
from engine.sequence.request_tokens import RequestTokens


class BlockProposer(StateProposer):
    """Grows drafts of at most `head.max_drafts` tokens from one block per sequence."""

    def __init__(self, runner: ModelRunner, head: BlockHead, tree: TreeConfig | None) -> None:
        super().__init__(runner, head, tree, head.max_drafts)
        self._block_head = head

    def _grow(self, chains: Seq[Chain], states: Tensor) -> None:
        tables = [(chain.sequence, chain.block_table) for chain in chains]
        self._blocks(tables, states, [chain.num_left for chain in chains]).grow(chains, self._chain_sampler)

    def _branch(self, trees: Seq[Tree], states: Tensor) -> None:
        tables = [(tree.sequence, tree.blocks.block_table) for tree in trees]
        self._blocks(tables, states, [tree.max_depth for tree in trees]).branch(trees, self._tree_sampler)

    def _blocks(self, sequences: Seq[tuple[RequestTokens, Seq[int]]], states: Tensor, wanted: Seq[int]) -> Blocks:
        """Compute a block for each sequence, with its block table, as long as wanted and as its slots allow."""
        head, size = self._block_head, self._runner.block_size
        num_drafts, spans = [], []
        for (sequence, table), num in zip(sequences, wanted, strict=True):
            start = len(sequence.token_ids) - 1
            most = len(table) * size - start - head.num_more_rows if head.layer_shapes else num
            num_drafts.append(max(0, min(num, most)))
            ids = head.block_ids(sequence.token_ids[-1], num_drafts[-1]) if num_drafts[-1] else []
            if ids:
                spans.append(Span(ids, start, table, num_drafts[-1] + min(head.num_more_rows, 0)))
        batch = self._runner.lay_out(spans, has_blocks=True) if spans else None
        drafting = [row for row, num in enumerate(num_drafts) if num]
        if not drafting:
            return Blocks(lambda rows, before: states[:0], num_drafts)
        return Blocks(head.block(batch, states[drafting], [num_drafts[row] for row in drafting]), num_drafts)

"""The base of head proposers, which keep each sequence's newest hidden state, and drafts by heads of whole blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.accounting.record import PassedRows
from engine.batch.draft import NO_DRAFT, Draft
from engine.batch.span import Span
from engine.config import TreeConfig
from engine.model.draft_heads.head import BlockHead, DraftHead
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.growth.block import Blocks
from engine.proposer.growth.chain import Chain, ChainSampler
from engine.proposer.growth.tree import Tree, tree_of
from engine.proposer.growth.tree_sampler import TreeSampler
from engine.sampling.sampler import Sampler
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens


class StateProposer(ABC):
    """A `Proposer` by hidden states: it drafts for every sequence that has decoded since it was opened.

    Drafts have at most `max_depth` tokens; without a `tree` all drafts are chains.

    Attributes:
        has_overflowed: logits of the last drafts were not finite.
    """

    # A head computes a draft together with the state before it, one slot earlier than a draft model.
    _position_offset = -1

    def __init__(
        self, runner: ModelRunner, head: DraftHead, tree: TreeConfig | None, max_depth: int | None = None
    ) -> None:
        self._runner = runner
        self._reading_head = head
        self._tree_config = tree
        self._max_depth = max_depth
        # The newest state of each open sequence, [S], and the number of committed tokens that it was computed for.
        self._newest: dict[str, tuple[Tensor, int] | None] = {}
        self.has_overflowed = False
        self._chain_sampler = ChainSampler(Sampler())
        self._tree_sampler = TreeSampler(Sampler())

    def open(self, sequence: RequestTokens) -> None:
        self._newest[sequence.request_id] = None

    def commit(self, sequences: Seq[RequestTokens]) -> None:  # noqa: B027
        """Do nothing: `learn` has kept the state of the newest token."""

    def close(self, request_id: str) -> None:
        self._newest.pop(request_id, None)

    @torch.inference_mode()
    def learn(self, passed: Seq[PassedRows]) -> None:
        """Let the head read the accepted rows of the runner's last pass; called after verification, before the commit.

        `passed` has all sequences, even those that are not open here: any block that a sequence adopts must have the
        head's KV.
        """
        features = self._runner.features
        assert features is not None, "the runner has a head, and its pass has rows"
        newest = [each for each in passed if each.is_newest]
        has_kv = bool(self._reading_head.layer_shapes)
        rows = [row for each in passed for row in each.rows] if has_kv else [each.rows[-1] for each in newest]
        if not rows:
            return
        if len(rows) < len(features) or not has_kv:
            features = features.index_select(0, torch.tensor(rows, device=features.device))
        for each, state in zip(newest, self._read(passed, features), strict=True):
            if each.sequence.request_id in self._newest:
                self._newest[each.sequence.request_id] = state, each.num_tokens

    def _read(self, passed: Seq[PassedRows], features: Tensor) -> Tensor:
        """Return the state after each sequence that has sampled; a head without KV reads no other rows."""
        spans = [Span(p.next_ids, p.start, p.sequence.block_table, int(p.is_newest)) for p in passed]
        batch = self._runner.lay_out(spans) if self._reading_head.layer_shapes else None
        return self._reading_head.read(batch, features)

    @torch.inference_mode()
    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        found = [(query, state) for query in queries if (state := self._state_of(query.sequence)) is not None]
        if not found:
            return [NO_DRAFT] * len(queries)
        states = torch.stack([state for _, state in found])
        is_tree = [self._tree_config is not None and query.max_tree_nodes > 0 for query, _ in found]
        chains = [self._chain(query) for (query, _), has_tree in zip(found, is_tree, strict=True) if not has_tree]
        trees = [self._tree(query) for (query, _), has_tree in zip(found, is_tree, strict=True) if has_tree]
        if chains:
            self._grow(chains, _rows_of(states, is_tree, False))
        if trees:
            self._branch(trees, _rows_of(states, is_tree, True))
        grown: list[Chain | Tree] = [*chains, *trees]
        drafts = {each.sequence.request_id: each.draft() for each in grown}
        self.has_overflowed = any(each.has_overflowed for each in grown)
        return [drafts.get(query.sequence.request_id, NO_DRAFT) for query in queries]

    def _state_of(self, sequence: RequestTokens) -> Tensor | None:
        """Return the newest state if it was computed for the present tokens."""
        newest = self._newest.get(sequence.request_id)
        return newest[0] if newest is not None and newest[1] == len(sequence.token_ids) else None

    @abstractmethod
    def _grow(self, chains: Seq[Chain], states: Tensor) -> None:
        """Extend chains (at least one) until all are long enough; `states` is `[B, S]`."""

    @abstractmethod
    def _branch(self, trees: Seq[Tree], states: Tensor) -> None:
        """Grow trees (at least one) level by level until no level is left; `states` is `[B, S]`."""

    def _chain(self, query: DraftQuery) -> Chain:
        sequence = query.sequence
        return Chain(
            sequence,
            sequence.token_ids,
            sequence.block_table,
            self._depth(query),
            matcher=sequence.matcher,
            position_offset=self._position_offset,
        )

    def _tree(self, query: DraftQuery) -> Tree:
        sequence, num_nodes = query.sequence, query.max_tree_nodes
        return tree_of(sequence, sequence, num_nodes, self._depth(query), sequence.matcher)

    def _depth(self, query: DraftQuery) -> int:
        return query.max_draft_tokens if self._max_depth is None else min(query.max_draft_tokens, self._max_depth)


def _rows_of(states: Tensor, flags: Seq[bool], flag: bool) -> Tensor:
    """Return the rows whose flag is `flag`; `states` itself if that is every row."""
    rows = [row for row, each in enumerate(flags) if each is flag]
    return states if len(rows) == len(flags) else states[rows]


class BlockProposer(StateProposer):
    """Grows drafts of at most `head.max_drafts` tokens from one block per sequence: all positions in one pass.

    The distributions of later positions depend on the earlier drafts little or not at all. This lowers acceptance, but
    stays exact: each draft is drawn from the distribution that it carries, or sampled with the verifier's noise.
    """

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

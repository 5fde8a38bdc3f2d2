"""The base of head proposers: keeps each sequence's newest hidden state, and grows a chain or a tree from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch.draft import NO_DRAFT, Draft
from engine.batch.span import Span
from engine.config import TreeConfig
from engine.model.draft_heads.head import DraftHead
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.growth.chain import Chain, ChainSampler
from engine.proposer.growth.tree import Tree
from engine.proposer.growth.tree_sampler import TreeSampler
from engine.proposer.growth.tree_shape import shape_of
from engine.proposer.passed_rows import PassedRows
from engine.sampling.sampler import Sampler
from engine.sequence.checked_draft import DraftQuery
from engine.sequence.request_tokens import RequestTokens


@dataclass(frozen=True, slots=True)
class _Newest:
    """A state, `[S]`, and the number of committed tokens that it was computed for."""

    state: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DraftableQueries:
    """Queries with a state, and their states, `[B, S]`."""

    queries: list[DraftQuery]
    states: Tensor


class NewestStates:
    """The states of a proposer's open sequences. A state is used only for the tokens that it was computed for."""

    def __init__(self) -> None:
        self._newest: dict[str, _Newest | None] = {}

    def open(self, sequence: RequestTokens) -> None:
        self._newest[sequence.request_id] = None

    def close(self, request_id: str) -> None:
        self._newest.pop(request_id, None)

    def keep(self, passed: Seq[PassedRows], states: Tensor) -> None:
        """Keep `states [B, S]`, which belong to the last rows of `passed`; all these sequences have sampled."""
        for each, state in zip(passed, states, strict=True):
            if each.sequence.request_id in self._newest:
                self._newest[each.sequence.request_id] = _Newest(state, each.num_tokens)

    def of(self, queries: Seq[DraftQuery]) -> DraftableQueries | None:
        """Return the queries that have a current state, in order; None if no query has one."""
        found = [(query, newest) for query in queries if (newest := self._of(query.sequence)) is not None]
        if not found:
            return None
        return DraftableQueries([query for query, _ in found], torch.stack([newest.state for _, newest in found]))

    def _of(self, sequence: RequestTokens) -> _Newest | None:
        newest = self._newest.get(sequence.request_id)
        return newest if newest is not None and newest.num_tokens == len(sequence.token_ids) else None


class StateProposer(ABC):
    """Implements `HeadProposer`. It drafts for every sequence that has decoded since it was opened.

    Drafts have at most `max_depth` tokens; without a `tree` all drafts are chains.
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
        self._states = NewestStates()
        self._chain_sampler = ChainSampler(Sampler())
        self._tree_sampler = TreeSampler(Sampler())

    def open(self, sequence: RequestTokens) -> None:
        self._states.open(sequence)

    def commit(self, sequences: Seq[RequestTokens]) -> None:  # noqa: B027
        """Do nothing: `learn` has kept the state of the newest token."""

    def close(self, request_id: str) -> None:
        self._states.close(request_id)

    @torch.inference_mode()
    def learn(self, passed: Seq[PassedRows]) -> None:
        """Let the head read the rows of all sequences: any block that a sequence adopts must have the head's KV."""
        features = self._runner.features
        assert features is not None, "the runner has a head, and its pass has rows"
        newest = [each for each in passed if each.is_newest]
        has_kv = bool(self._reading_head.layer_shapes)
        rows = [row for each in passed for row in each.rows] if has_kv else [each.rows[-1] for each in newest]
        if not rows:
            return
        if len(rows) < len(features) or not has_kv:
            features = features.index_select(0, torch.tensor(rows, device=features.device))
        self._states.keep(newest, self._read(passed, features))

    def _read(self, passed: Seq[PassedRows], features: Tensor) -> Tensor:
        """Return the state after each sequence that has sampled; a head without KV reads no other rows."""
        spans = [Span(p.next_ids, p.start, p.sequence.block_table, int(p.is_newest)) for p in passed]
        batch = self._runner.lay_out(spans) if self._reading_head.layer_shapes else None
        return self._reading_head.read(batch, features)

    @torch.inference_mode()
    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        draftable = self._states.of(queries)
        if draftable is None:
            return [NO_DRAFT] * len(queries)
        is_tree = [self._tree_config is not None and query.max_tree_nodes > 0 for query in draftable.queries]
        chains = [
            self._chain(query) for query, has_tree in zip(draftable.queries, is_tree, strict=True) if not has_tree
        ]
        trees = [self._tree(query) for query, has_tree in zip(draftable.queries, is_tree, strict=True) if has_tree]
        if chains:
            self._grow(chains, _rows_of(draftable.states, is_tree, False))
        if trees:
            self._branch(trees, _rows_of(draftable.states, is_tree, True))
        grown: list[Chain | Tree] = [*chains, *trees]
        drafts = {each.sequence.request_id: each.draft() for each in grown}
        return [drafts.get(query.sequence.request_id, NO_DRAFT) for query in queries]

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
        assert self._tree_config is not None, "only a configured tree can be grown"
        depth = self._depth(query)
        shape = shape_of(self._tree_config, query.sequence, query.max_tree_nodes, depth)
        return Tree(query.sequence, query.sequence, shape, query.max_tree_nodes, depth, query.sequence.matcher)

    def _depth(self, query: DraftQuery) -> int:
        return query.max_draft_tokens if self._max_depth is None else min(query.max_draft_tokens, self._max_depth)


def _rows_of(states: Tensor, flags: Seq[bool], flag: bool) -> Tensor:
    """Return the rows whose flag is `flag`; `states` itself if that is every row."""
    rows = [row for row, each in enumerate(flags) if each is flag]
    return states if len(rows) == len(flags) else states[rows]

"""Drafts by heads on the target's hidden states: by heads of whole blocks, and by recurrent heads.

A recurrent head is a language model of one layer. Its inputs are pairs. With n committed tokens the newest pair is
n - 2: the feature of position n - 2 with token n - 1. Its state gives the first draft. The next step computes this
state and this draft as pair n - 1, and so on, in the slots that are reserved for verification. After verification the
true pairs overwrite them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.accounting.record import PassedRows
from engine.batch.draft import NO_DRAFT, Draft
from engine.batch.indexing import index_tensor
from engine.batch.span import Span
from engine.model.draft_heads.head import BlockHead, DraftHead, RecurrentHead
from engine.model.draft_heads.mtp import MtpHead
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.chain import Chain, ChainSampler, begun, next_steps
from engine.proposer.tree import Blocks, Tree, TreeSampler, tree_of
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens


class StateProposer(ABC):
    """A `Proposer` by hidden states: it drafts for every sequence that has decoded since it was opened.

    Drafts have at most `max_depth` tokens.

    Attributes:
        has_overflowed: logits of the last drafts were not finite.
    """

    # A head computes a draft together with the state before it, one slot earlier than a draft model.
    _position_offset = -1

    def __init__(self, runner: ModelRunner, head: DraftHead, max_depth: int | None = None) -> None:
        self._runner = runner
        self._reading_head = head
        self._max_depth = max_depth
        # The newest state of each open sequence, [S], and the number of committed tokens that it was computed for.
        self._newest: dict[str, tuple[Tensor, int] | None] = {}
        self.has_overflowed = False
        self._chain_sampler = ChainSampler()
        self._tree_sampler = TreeSampler()

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
        is_tree = [query.max_tree_nodes > 0 for query, _ in found]
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

    def __init__(self, runner: ModelRunner, head: BlockHead) -> None:
        super().__init__(runner, head, head.max_drafts)
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


class RecurrentProposer(StateProposer):
    """Grows a draft by one step of the head per token, or per level of a tree.

    The head computes its KV for every row of the target, even if another proposer drafts for the sequence. The last
    pair of a cached prefix may have the next token of another continuation, with the right feature.
    """

    def __init__(self, runner: ModelRunner, head: RecurrentHead) -> None:
        super().__init__(runner, head)
        self._head = head

    def _grow(self, chains: Seq[Chain], states: Tensor) -> None:
        self._grow_after(chains, states, self._chain_sampler.extend(chains, self._head.logits(states)))

    def _grow_after(self, chains: Seq[Chain], states: Tensor, token_ids: Tensor) -> None:
        """Extend chains after their last tokens `token_ids` [B], which were drawn from `states`."""
        while growing := [row for row, chain in enumerate(chains) if chain.num_left > 0]:
            if len(growing) < len(chains):
                index = index_tensor(growing, states.device)
                chains, states, token_ids = [chains[row] for row in growing], states[index], token_ids[index]
            spans = next_steps(chains)
            if recorded := begun(self._runner.head_steps(spans), chains, spans, token_ids, states):
                self._chain_sampler.run_steps(recorded, chains)
                token_ids, states = recorded.last_ids, recorded.states
                continue
            for step in self._runner.plan_steps(spans):
                step.input_ids.copy_(token_ids)
                states = self._head.step(step, states)
                token_ids = self._chain_sampler.extend(chains, self._head.logits(states))

    def _branch(self, trees: Seq[Tree], states: Tensor) -> None:
        """Grow trees level by level until no level is worth a pass; `states` has a row per node of the levels.

        Dropped nodes take slots too; a tree without free slots ends.
        """
        while trees:
            levels = [tree.level for tree in trees]
            self._tree_sampler.branch(trees, self._head.logits(states))
            for tree in trees:
                if tree.num_slots - 1 > len(tree.blocks.block_table) * self._runner.block_size:
                    tree.stop()
            parents = _parent_rows(trees, levels)
            trees = [tree for tree in trees if tree.level]
            if trees:
                spans = [span._replace(start=span.start - 1) for span in (tree.span() for tree in trees)]
                states = self._head.forward(self._runner.lay_out(spans), states[parents])


class MtpProposer(RecurrentProposer):
    """Grows each of the first drafts by its own module of an MTP, and later drafts by the last module.

    With n committed tokens, three modules have these pairs of their predecessor's states and later tokens:

        position      n - 4     n - 3     n - 2
        module 0      t(n-3)    t(n-2)    t(n-1)     its last state gives draft 0
        module 1      t(n-2)    t(n-1)    draft 0    its last state gives draft 1
        module 2      t(n-1)    draft 0   draft 1    its last state gives draft 2

    A pair with a draft is computed in every pass, and the true pair overwrites it as soon as its token is committed.
    The pairs at the end of a cached prefix may have tokens of another continuation. Trees grow by the first
    module alone.
    """

    def __init__(self, runner: ModelRunner, head: MtpHead) -> None:
        super().__init__(runner, head)
        self._mtp = head
        self._position_offset = -head.num_modules
        # Committed tokens, and each module's last state before any draft entered: [1, S], or [0, S] where the text has
        # not come so far.
        self._last: WeakKeyDictionary[RequestTokens, tuple[int, Seq[Tensor]]] = WeakKeyDictionary()

    def _read(self, passed: Seq[PassedRows], features: Tensor) -> Tensor:
        """Let each module read the pairs whose tokens are committed now."""
        before = [self._last_states(each.sequence, each.start + 1, features) for each in passed]
        found: list[list[Tensor]] = [[] for _ in passed]
        inputs = list(features.split([len(each.rows) for each in passed]))
        for module in range(self._mtp.num_modules):
            spans = [
                _span(each.sequence.block_table, each.num_tokens - 1 - module, each.next_ids[-len(states) :])
                for each, states in zip(passed, inputs, strict=True)
                if len(states)
            ]
            outputs = self._run(module, spans, inputs)
            for index, (last, states) in enumerate(zip(before, outputs, strict=True)):
                joined = torch.cat((last[module], states))
                inputs[index] = joined[:-1]
                found[index].append(joined[-1:].clone())
        for each, states_of in zip(passed, found, strict=True):
            self._last[each.sequence] = each.num_tokens, states_of
        newest = [states_of[0] for each, states_of in zip(passed, found, strict=True) if each.is_newest]
        return torch.cat(newest) if newest else features[:0]

    def _grow(self, chains: Seq[Chain], states: Tensor) -> None:
        token_ids = self._chain_sampler.extend(chains, self._head.logits(states))
        inputs, drafts = states.split(1), token_ids[:, None]  # [B, drafts so far]
        # Each later module reads the states of its predecessor at the last positions, with the drafts so far, and
        # drafts one token more.
        for module in range(1, self._mtp.num_modules):
            growing = [row for row, chain in enumerate(chains) if chain.num_left > 0]
            if not growing:
                return
            chains, inputs, drafts = [chains[row] for row in growing], [inputs[row] for row in growing], drafts[growing]
            ends = [len(chain.sequence.token_ids) - 1 for chain in chains]
            spans = [
                _span(chain.block_table, end, [0] * len(each))
                for chain, end, each in zip(chains, ends, inputs, strict=True)
            ]
            pairs = torch.cat([drafts[row, -len(each) :] for row, each in enumerate(inputs)])
            outputs = self._run(module, spans, inputs, pairs)
            states = torch.stack([each[-1] for each in outputs])
            token_ids = self._chain_sampler.extend(chains, self._head.logits(states))
            drafts = torch.cat((drafts, token_ids[:, None]), dim=1)
            last = [self._last_states(chain.sequence, end + 1, states) for chain, end in zip(chains, ends, strict=True)]
            inputs = [torch.cat((each[module], output)) for each, output in zip(last, outputs, strict=True)]
        self._grow_after(chains, states, token_ids)

    def _run(self, module: int, spans: Seq[Span], inputs: Seq[Tensor], ids: Tensor | None = None) -> Seq[Tensor]:
        """Return a module's state for each of the inputs, which have the rows of `spans`; `ids` are their tokens."""
        if not spans:
            return inputs
        batch = self._runner.lay_out(spans)
        if ids is not None:
            batch.input_ids.copy_(ids)
        states = self._mtp.forward(batch, torch.cat(tuple(inputs)), module)
        return list(states.split([len(each) for each in inputs]))

    def _last_states(self, sequence: RequestTokens, num_tokens: int, like: Tensor) -> Seq[Tensor]:
        """Return the last states of a text of `num_tokens`; empty ones after a cached prefix."""
        last = self._last.get(sequence)
        if last is None or last[0] != num_tokens:
            return [like[:0]] * self._mtp.num_modules
        return last[1]


def _span(block_table: Seq[int], end: int, token_ids: Seq[int]) -> Span:
    """Return the rows of `token_ids` that end at position `end`, all with a state."""
    return Span(token_ids, end - len(token_ids), block_table, len(token_ids))


def _parent_rows(trees: Seq[Tree], levels: Seq[Seq[int]]) -> list[int]:
    """Return for every node of the trees' levels the row of its parent in the previous levels, `levels`."""
    rows: list[int] = []
    first = 0
    for tree, level in zip(trees, levels, strict=True):
        rows_of = {node: first + index for index, node in enumerate(level)}
        rows += [rows_of[parent] for parent in tree.level_parents]
        first += len(level)
    return rows

"""Drafts by a recurrent head: a language model of one layer on the target's hidden states.

Its inputs are pairs. With n committed tokens the newest pair is n - 2: the feature of position n - 2 with token n - 1.
Its state gives the first draft. The next step computes this state and this draft as pair n - 1, and so on, in the slots
that are reserved for verification. After verification the true pairs overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.accounting.record import PassedRows
from engine.batch.indexing import index_tensor
from engine.batch.span import Span
from engine.config import TreeConfig
from engine.model.draft_heads.head import RecurrentHead
from engine.model.draft_heads.mtp import MtpHead
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.growth.chain import Chain, begun, next_steps
from engine.proposer.growth.tree import Tree
from engine.proposer.hidden_state.state_proposer import StateProposer
from engine.sequence.sequence import RequestTokens


class RecurrentProposer(StateProposer):
    """Grows a draft by one step of the head per token, or per level of a tree.

    The head computes its KV for every row of the target, even if another proposer drafts for the sequence. The last
    pair of a cached prefix may have the next token of another continuation, with the right feature.
    """

    def __init__(self, runner: ModelRunner, head: RecurrentHead, tree: TreeConfig | None) -> None:
        super().__init__(runner, head, tree)
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

    def __init__(self, runner: ModelRunner, head: MtpHead, tree: TreeConfig | None) -> None:
        super().__init__(runner, head, tree)
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

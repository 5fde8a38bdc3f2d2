"""Drafts by a recurrent head: a language model of one layer that goes on from the target's hidden states.

With n committed tokens the newest pair that can be computed is n - 2, the feature of position n - 2 and token n - 1;
its state tells the first draft. A step then feeds the state and the draft that it told as pair n - 1, and so on, in the
slots that the verification has reserved. When the pass is verified the true pairs overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.config import TreeConfig
from engine.model.draft_heads.recurrent import RecurrentHead
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.growth.chain import Chain, next_steps
from engine.proposer.growth.tree import Tree
from engine.proposer.hidden_state.state_proposer import StateProposer
from engine.proposer.passed_rows import PassedRows
from engine.span import Span


class RecurrentProposer(StateProposer):
    """Grows a draft by a step of the head for each token, or for each level of a tree.

    Every row that the target computes is learned, whatever drafts for its sequence, so that whatever block a sequence
    adopts has the head's KV too. Where a cached prefix ends, the pair of its last position may be that of another
    continuation: the right feature, and the token that followed there.
    """

    def __init__(self, runner: ModelRunner, head: RecurrentHead, tree: TreeConfig | None) -> None:
        super().__init__(runner, tree)
        self._head = head

    @torch.inference_mode()
    def learn(self, passed: Seq[PassedRows]) -> None:
        features = self._runner.features
        assert features is not None, "the runner has a head, and its pass has rows"
        rows = [row for each in passed for row in each.rows]
        if len(rows) < len(features):
            features = features.index_select(0, torch.tensor(rows, device=features.device))
        spans = [Span(p.next_ids, p.start, p.sequence.block_table, int(p.is_newest)) for p in passed]
        states = self._head.forward(self._runner.lay_out(spans), self._head.enter(features))
        self._states.keep([each for each in passed if each.is_newest], states)

    def _grow(self, chains: Seq[Chain], states: Tensor) -> None:
        token_ids = self._chain_sampler.extend(chains, self._head.logits(states))
        while growing := [row for row, chain in enumerate(chains) if chain.num_left > 0]:
            if len(growing) < len(chains):
                chains, states, token_ids = [chains[row] for row in growing], states[growing], token_ids[growing]
            for step in self._runner.plan_steps(next_steps(chains)):
                step.input_ids.copy_(token_ids)
                states = self._head.forward(step, states)
                token_ids = self._chain_sampler.extend(chains, self._head.logits(states))

    def _branch(self, trees: Seq[Tree], states: Tensor) -> None:
        """Grow trees level by level, until no level is left that is worth a pass; `states` are those of the levels.

        What is computed and then dropped takes slots too: a tree that has none left stays as it is.
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


def _parent_rows(trees: Seq[Tree], levels: Seq[Seq[int]]) -> list[int]:
    """For every node of the trees' levels, the row of its parent among those of the levels before, `levels`."""
    rows: list[int] = []
    first = 0
    for tree, level in zip(trees, levels, strict=True):
        rows_of = {node: first + index for index, node in enumerate(level)}
        rows += [rows_of[parent] for parent in tree.level_parents]
        first += len(level)
    return rows

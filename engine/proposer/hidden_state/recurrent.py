"""Drafts by a recurrent head: a language model of one layer on the target's hidden states.

Its inputs are pairs. With n committed tokens the newest pair is n - 2: the feature of position n - 2 with token n - 1.
Its state gives the first draft. The next step computes this state and this draft as pair n - 1, and so on, in the slots
that are reserved for verification. After verification the true pairs overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.batch.indexing import index_tensor
from engine.config import TreeConfig
from engine.model.draft_heads.head import RecurrentHead
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.growth.chain import Chain, next_steps
from engine.proposer.growth.tree import Tree
from engine.proposer.hidden_state.state_proposer import StateProposer


class RecurrentProposer(StateProposer):
    """Grows a draft by one step of the head per token, or per level of a tree.

    The head computes its KV for every row of the target, even if another proposer drafts for the sequence. The last
    pair of a cached prefix may have the next token of another continuation, with the right feature.
    """

    def __init__(self, runner: ModelRunner, head: RecurrentHead, tree: TreeConfig | None) -> None:
        super().__init__(runner, head, tree)
        self._head = head

    def _grow(self, chains: Seq[Chain], states: Tensor) -> None:
        token_ids = self._chain_sampler.extend(chains, self._head.logits(states))
        while growing := [row for row, chain in enumerate(chains) if chain.num_left > 0]:
            if len(growing) < len(chains):
                index = index_tensor(growing, states.device)
                chains, states, token_ids = [chains[row] for row in growing], states[index], token_ids[index]
            for step in self._runner.plan_steps(next_steps(chains)):
                step.input_ids.copy_(token_ids)
                states = self._head.forward(step, states)
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


def _parent_rows(trees: Seq[Tree], levels: Seq[Seq[int]]) -> list[int]:
    """Return for every node of the trees' levels the row of its parent in the previous levels, `levels`."""
    rows: list[int] = []
    first = 0
    for tree, level in zip(trees, levels, strict=True):
        rows_of = {node: first + index for index, node in enumerate(level)}
        rows += [rows_of[parent] for parent in tree.level_parents]
        first += len(level)
    return rows

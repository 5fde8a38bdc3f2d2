"""The proposer of a runner's head."""

from __future__ import annotations

from engine.config import TreeConfig
from engine.model.draft_heads.medusa import MedusaHeads
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import HeadProposer
from engine.proposer.hidden_state.medusa import MedusaProposer
from engine.proposer.hidden_state.recurrent import RecurrentProposer


def head_proposer(runner: ModelRunner, tree: TreeConfig | None) -> HeadProposer | None:
    """Return a proposer by the head of `runner`, of trees where there is a `tree`; None for a runner without a head."""
    if runner.head is None:
        return None
    if isinstance(runner.head, MedusaHeads):
        return MedusaProposer(runner, runner.head, tree)
    return RecurrentProposer(runner, runner.head, tree)

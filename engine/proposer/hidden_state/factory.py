"""The proposers in a runner's own process: by its head, or by its own weights."""

from __future__ import annotations

from engine.config import TreeConfig
from engine.model.draft_heads.dflash import DFlashHead
from engine.model.draft_heads.eagle3 import ParallelEagleHead
from engine.model.draft_heads.medusa import MedusaHeads
from engine.model.draft_heads.mtp import MtpHead
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import HeadProposer, Proposer
from engine.proposer.dispatch.guarded_proposer import GuardedProposer
from engine.proposer.hidden_state.block import BlockProposer
from engine.proposer.hidden_state.recurrent import MtpProposer, RecurrentProposer
from engine.proposer.self_proposer import SelfProposer


def head_proposer(runner: ModelRunner, tree: TreeConfig | None) -> HeadProposer | None:
    """Return a proposer with the runner's head, or None if it has no head; with a `tree` it can draft trees."""
    if runner.head is None:
        return None
    if isinstance(runner.head, (MedusaHeads, ParallelEagleHead, DFlashHead)):
        return BlockProposer(runner, runner.head, tree)
    if isinstance(runner.head, MtpHead):
        return MtpProposer(runner, runner.head, tree)
    return RecurrentProposer(runner, runner.head, tree)


def self_proposer(runner: ModelRunner, tree: TreeConfig | None) -> Proposer | None:
    """Return a proposer with the runner's own weights; None if the runner does not draft for itself."""
    if runner.self_draft is None:
        return None
    return GuardedProposer(SelfProposer(runner, runner.self_draft, tree))

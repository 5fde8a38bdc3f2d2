"""The proposers in a runner's own process: by its head, or by its own weights."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.batch.draft import NO_DRAFT, Draft
from engine.config import TreeConfig
from engine.model.draft_heads.dflash import DFlashHead
from engine.model.draft_heads.eagle3 import ParallelEagleHead
from engine.model.draft_heads.loader import Head
from engine.model.draft_heads.medusa import MedusaHeads
from engine.model.draft_heads.mtp import MtpHead
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import HeadProposer, Proposer
from engine.proposer.dispatch.guarded_proposer import GuardedProposer
from engine.proposer.hidden_state.block import BlockProposer
from engine.proposer.hidden_state.recurrent import MtpProposer, RecurrentProposer
from engine.proposer.passed_rows import PassedRows
from engine.proposer.self_proposer import SelfProposer
from engine.sequence.checked_draft import DraftQuery
from engine.sequence.request_tokens import RequestTokens
from engine.verifier.verify_task import IMPOSSIBLE_ID


class LiveHead:
    """Implements `HeadProposer` by the runner's head, which may be exchanged between two steps.

    The previous head stays loaded. A draft that is not finite makes `has_failed` true, and there are no drafts until
    `exchange` returns to that head.

    Args:
        runner: it has a head.
        tree: the limits of trees; None for chains alone.
    """

    def __init__(self, runner: ModelRunner, tree: TreeConfig | None) -> None:
        assert runner.head is not None, "as required"
        self.previous: Head | None = None  # None also after a return: that head is not left once more
        self.has_failed = False
        self._runner, self._tree = runner, tree
        self._proposer = _proposer_of(runner, runner.head, tree)
        self._opened: dict[str, RequestTokens] = {}

    def exchange(self, head: Head) -> None:
        """Let `head` draft. It has no KV of the sequences with blocks, and drafts for them only if it needs none."""
        self.previous = None if self.has_failed else self._runner.head
        self.has_failed = False
        self._runner.head = head
        self._proposer = _proposer_of(self._runner, head, self._tree)
        for sequence in self._opened.values():
            if not (head.layer_shapes and sequence.block_table):
                self._proposer.open(sequence)

    def open(self, sequence: RequestTokens) -> None:
        self._opened[sequence.request_id] = sequence
        self._proposer.open(sequence)

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        self._proposer.commit(sequences)

    def close(self, request_id: str) -> None:
        self._opened.pop(request_id, None)
        self._proposer.close(request_id)

    def learn(self, passed: Seq[PassedRows]) -> None:
        self._proposer.learn(passed)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        drafts = self._proposer.propose(queries)
        if self.previous is not None and any(IMPOSSIBLE_ID in draft.token_ids for draft in drafts):
            self.has_failed = True
        return [NO_DRAFT] * len(queries) if self.has_failed else drafts


def _proposer_of(runner: ModelRunner, head: Head, tree: TreeConfig | None) -> HeadProposer:
    if isinstance(head, (MedusaHeads, ParallelEagleHead, DFlashHead)):
        return BlockProposer(runner, head, tree)
    if isinstance(head, MtpHead):
        return MtpProposer(runner, head, tree)
    return RecurrentProposer(runner, head, tree)


def self_proposer(runner: ModelRunner, tree: TreeConfig | None) -> Proposer | None:
    """Return a proposer with the runner's own weights; None if the runner does not draft for itself."""
    if runner.self_draft is None:
        return None
    return GuardedProposer(SelfProposer(runner, runner.self_draft, tree))

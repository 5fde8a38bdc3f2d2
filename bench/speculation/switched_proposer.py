"""Proposers for benchmarks of drafting: one engine tries several in turn, and what one proposed is proposed again."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.draft import NO_DRAFT, Draft
from engine.proposer import Proposer
from engine.proposer.dispatch.no_proposer import NoProposer
from engine.sequence.batch import ScheduledSequence
from engine.sequence.sequence import Sequence


class SwitchedProposer:
    """Stands for `current`, which may be changed while no sequence is open; remembers all it has proposed."""

    def __init__(self) -> None:
        self.current: Proposer = NoProposer()
        self.recorded: dict[tuple[str, int], Draft] = {}

    def open(self, sequence: Sequence) -> None:
        self.current.open(sequence)

    def propose(self, shares: Seq[ScheduledSequence]) -> list[Draft]:
        drafts = self.current.propose(shares)
        for share, draft in zip(shares, drafts, strict=True):
            self.recorded[_pass_of(share)] = draft
        return drafts

    def commit(self, sequences: Seq[Sequence]) -> None:
        self.current.commit(sequences)

    def close(self, request_id: str) -> None:
        self.current.close(request_id)


class ReplayProposer(NoProposer):
    """Proposes what was recorded for the same passes: drafts that cost nothing, so that a step is a bare verification.

    `recorded` is read when it is needed, so a run may be recorded after this was made.
    """

    def __init__(self, recorded: dict[tuple[str, int], Draft]) -> None:
        self._recorded = recorded

    def propose(self, shares: Seq[ScheduledSequence]) -> list[Draft]:
        return [self._recorded.get(_pass_of(share), NO_DRAFT) for share in shares]


def _pass_of(share: ScheduledSequence) -> tuple[str, int]:
    return share.sequence.request_id, len(share.sequence.token_ids)

"""No speculation: plain decoding as the trivial proposer."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.draft import NO_DRAFT, Draft
from engine.sequence.batch import ScheduledSequence
from engine.sequence.sequence import Sequence


class NoProposer:
    """Proposes nothing, so that every pass is plain decoding."""

    def open(self, sequence: Sequence) -> None:
        pass

    def propose(self, shares: Seq[ScheduledSequence]) -> list[Draft]:
        return [NO_DRAFT] * len(shares)

    def commit(self, sequences: Seq[Sequence]) -> None:
        pass

    def close(self, request_id: str) -> None:
        pass

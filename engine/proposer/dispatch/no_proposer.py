"""The proposer of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.batch.draft import NO_DRAFT, Draft
from engine.sequence.checked_draft import DraftQuery
from engine.sequence.request_tokens import RequestTokens


class NoProposer:
    """Proposes nothing: every pass is plain decoding."""

    def open(self, sequence: RequestTokens) -> None:
        """Do nothing."""

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        return [NO_DRAFT] * len(queries)

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Do nothing."""

    def close(self, request_id: str) -> None:
        """Do nothing."""

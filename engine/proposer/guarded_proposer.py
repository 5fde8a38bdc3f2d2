"""Guards a drafter in the target's process: its failure costs drafts only, like the end of a draft process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

from engine.batch.draft import NO_DRAFT, Draft
from engine.proposer import Proposer
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


logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class GuardedProposer:
    """Wraps a proposer and switches it off permanently at its first exception.

    The exception is logged once, and every later draft is `NO_DRAFT`.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.is_on = True

    def open(self, sequence: RequestTokens) -> None:
        """Open the sequence in the proposer."""
        self._try(lambda: self._proposer.open(sequence), None)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Return the proposer's drafts, or no drafts once it is off."""
        return self._try(lambda: self._proposer.propose(queries), [NO_DRAFT] * len(queries))

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Commit in the proposer."""
        self._try(lambda: self._proposer.commit(sequences), None)

    def close(self, request_id: str) -> None:
        """Close the sequence in the proposer."""
        self._try(lambda: self._proposer.close(request_id), None)

    def _try(self, act: Callable[[], _Answer], without: _Answer) -> _Answer:
        # Broad, since this replaces the edge of a draft process: no draft may end the target.
        try:
            return act()
        except Exception:
            logger.exception("the draft failed in the target's process and is off; plain decoding continues")
            self._proposer = NoProposer()
            self.is_on = False
            return without

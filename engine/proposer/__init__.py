"""Proposers draft the next tokens. A wrong, late or missing draft never changes the output's distribution.

`GuardedProposer` guards a drafter in the target's process: its failure costs drafts only, like the end of a draft
process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol, TypeVar

from engine.batch.draft import NO_DRAFT, Draft
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class Proposer(Protocol):
    """A source of drafts: a remote draft, a model in the same process, or a table of n-grams.

    The order per sequence is `open`, then (`propose`, `commit`) for every pass, then `close`. A preempted sequence
    stays open. Implementations never raise for an unknown sequence and never block beyond their own deadline.
    """

    def open(self, sequence: RequestTokens) -> None:
        """Add a sequence. A draft model can start to prefill the prompt."""

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Return one draft per query, in order; `NO_DRAFT` is always allowed.

        A draft continues the committed tokens, `query.sequence.token_ids`, by at most `query.max_draft_tokens` tokens.
        """

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Called after new tokens were committed to these sequences, before their next `propose`.

        Finished sequences are left out, and so are sequences that the next pass decodes without drafts: their new
        tokens come with a later call.
        """

    def close(self, request_id: str) -> None:
        """Remove a finished or aborted sequence; unknown ids are ignored."""


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


class GuardedProposer:
    """Wraps a proposer and switches it off permanently at its first exception.

    The exception is logged once, and every later draft is `NO_DRAFT`.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.is_on = True

    def open(self, sequence: RequestTokens) -> None:
        self._try(lambda: self._proposer.open(sequence), None)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        return self._try(lambda: self._proposer.propose(queries), [NO_DRAFT] * len(queries))

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        self._try(lambda: self._proposer.commit(sequences), None)

    def close(self, request_id: str) -> None:
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

"""Proposers draft the next tokens. A wrong, late or missing draft never changes the output's distribution."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from engine.accounting.record import PassedRows
from engine.batch.draft import Draft
from engine.sequence.checked_draft import DraftQuery
from engine.sequence.request_tokens import RequestTokens


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


class HeadProposer(Proposer, Protocol):
    """A proposer in the target's process that uses the target's hidden states."""

    def learn(self, passed: Seq[PassedRows]) -> None:
        """Take the accepted rows of the runner's last pass; called after verification and before the commit.

        `passed` has all sequences, even those that are not open here: other sequences may reuse their blocks.
        """

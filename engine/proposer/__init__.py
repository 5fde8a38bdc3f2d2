"""Proposers draft what may come next; no draft, however wrong, late or absent, changes the output's distribution."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from engine.draft import Draft
from engine.proposer.passed_rows import PassedRows
from engine.sequence.draft_query import DraftQuery
from engine.sequence.request_tokens import RequestTokens


class Proposer(Protocol):
    """The engine's side of drafting; a remote draft, an in-process model and a table of n-grams all look like this.

    The order per sequence is `open`, then (`propose`, `commit`) for every pass, then `close`. A preempted sequence
    stays open. Implementations never raise for a sequence they do not know and never block beyond their own deadline.
    """

    def open(self, sequence: RequestTokens) -> None:
        """The sequence was added; its prompt may be read (a draft model can start its own prefill)."""

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """One draft for each query, in order, of at most `query.max_draft_tokens` tokens; `NO_DRAFT` is always allowed.

        Tokens continue `query.sequence.token_ids`, all of which are committed.
        """

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """These sequences' `token_ids` have grown since they were last told of, and a draft will be asked for.

        Finished ones are not among them, nor those that the next pass will decode plainly: they cost nothing, and the
        next call has all that they have gained meanwhile.
        """

    def close(self, request_id: str) -> None:
        """The sequence ended or was aborted; unknown ids are ignored."""


class HeadProposer(Proposer, Protocol):
    """A proposer that reads the target's hidden states, in the target's process."""

    def learn(self, passed: Seq[PassedRows]) -> None:
        """The runner's last pass is verified, and these rows of it stand; called before the pass is committed.

        All sequences are among them, those that are not open here included: others may adopt what they leave behind.
        """

"""Drafts that cost nothing: continuations of a text's end, from the text itself or from another text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.batch.draft import DraftSource
from engine.sequence.request_tokens import RequestTokens


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A continuation, and the number of context tokens that match."""

    token_ids: tuple[int, ...]
    match_len: int


class TextMatcher(Protocol):
    """Finds a draft for an open sequence immediately, with the length of its matching context.

    A match is a function of committed tokens and of other texts, so q is one-hot for every verifier.

    Attributes:
        source: The source of its drafts.
    """

    source: DraftSource

    def is_for(self, sequence: RequestTokens) -> bool:
        """True if this sequence can have matches."""

    def open(self, sequence: RequestTokens) -> None:
        """Add a sequence with its prompt."""

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Called after new tokens were committed to these sequences."""

    def close(self, request_id: str) -> None:
        """Remove a finished sequence; unknown ids are ignored."""

    def match(self, sequence: RequestTokens, max_tokens: int) -> TextMatch | None:
        """Return the next tokens, at most `max_tokens`, or None."""

"""Drafts that cost nothing: continuations that a text itself, or a text beside it, has for its end."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.draft import DraftSource
from engine.sequence.request_tokens import RequestTokens


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A continuation, and how many tokens of the context support it."""

    token_ids: tuple[int, ...]
    match_len: int


class TextMatcher(Protocol):
    """Tells at once, for every open sequence, what it would draft and how far the context supports it.

    A match is a function of committed tokens and of other texts, so every verifier treats it as certain.

    Attributes:
        source: the source of its drafts.
    """

    source: DraftSource

    def is_for(self, sequence: RequestTokens) -> bool:
        """True if there can be matches for this sequence at all."""

    def open(self, sequence: RequestTokens) -> None:
        """The sequence was added; its prompt may be read."""

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """These sequences' `token_ids` have grown."""

    def close(self, request_id: str) -> None:
        """The sequence ended; unknown ids are ignored."""

    def match(self, sequence: RequestTokens, max_tokens: int) -> TextMatch | None:
        """Return the next tokens, at most `max_tokens`, or None."""

"""Counts of the tokens that get lost between two vocabularies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TranslationCounts:
    """Tokens that a draft wanted to say, and those of them that came to nothing.

    The target has no token for them, or their text cannot follow what is committed.
    """

    num_tokens: int = 0
    num_lost: int = 0

    def __add__(self, other: TranslationCounts) -> TranslationCounts:
        return TranslationCounts(self.num_tokens + other.num_tokens, self.num_lost + other.num_lost)

    def __sub__(self, other: TranslationCounts) -> TranslationCounts:
        return TranslationCounts(self.num_tokens - other.num_tokens, self.num_lost - other.num_lost)

"""Counts of tokens that are lost between two vocabularies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TranslationCounts:
    """The number of drafted tokens, and of lost tokens.

    A token is lost if the target has no token for it, or if its text cannot follow the committed text.
    """

    num_tokens: int = 0
    num_lost: int = 0

    def __add__(self, other: TranslationCounts) -> TranslationCounts:
        return TranslationCounts(self.num_tokens + other.num_tokens, self.num_lost + other.num_lost)

    def __sub__(self, other: TranslationCounts) -> TranslationCounts:
        return TranslationCounts(self.num_tokens - other.num_tokens, self.num_lost - other.num_lost)

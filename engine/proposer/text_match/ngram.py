"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last few tokens (Saxena 2023).

It needs no model and no GPU. The draft is a function of the prefix, so q is one-hot for every verifier.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.batch.draft import NO_DRAFT, Draft, DraftSource
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens
from protos.errors import ConfigError


class NgramProposer:
    """Drafts the continuation of the latest earlier occurrence of the longest known suffix.

    Suffixes have `min_size` to `max_size` tokens. The cost of a step depends on its committed tokens, not the context.
    """

    def __init__(self, min_size: int = 2, max_size: int = 4) -> None:
        if not 1 <= min_size <= max_size:
            raise ConfigError(f"n-gram sizes {min_size} to {max_size} are not a range; use 1 <= min_size <= max_size")
        self._sizes = range(min_size, max_size + 1)
        self._tables: dict[str, _ContinuationTable] = {}

    def open(self, sequence: RequestTokens) -> None:
        table = self._tables[sequence.request_id] = _ContinuationTable(self._sizes)
        table.extend(sequence.token_ids)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        return [self._draft(query.sequence, query.max_draft_tokens) for query in queries]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        for sequence in sequences:
            table = self._tables.get(sequence.request_id)
            if table is not None:
                table.extend(sequence.token_ids)

    def close(self, request_id: str) -> None:
        self._tables.pop(request_id, None)

    def _draft(self, sequence: RequestTokens, num_tokens: int) -> Draft:
        table = self._tables.get(sequence.request_id)
        start = table.find(sequence.token_ids) if table is not None and num_tokens > 0 else None
        if start is None:
            return NO_DRAFT
        return Draft(copy_from(sequence.token_ids, start, num_tokens), source=DraftSource.NGRAM)


class _ContinuationTable:
    """The index after the last occurrence of each n-gram of one sequence."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._num_indexed = 0  # tokens that are indexed as continuations
        self._continuations: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence

    def extend(self, token_ids: Seq[int]) -> None:
        """Index the tokens added since the last call; `token_ids` only grows."""
        for end in range(self._num_indexed, len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._continuations[tuple(token_ids[end - size : end])] = end
        self._num_indexed = len(token_ids)

    def find(self, token_ids: Seq[int]) -> int | None:
        """Return the index after the last earlier occurrence of the longest known suffix."""
        for size in reversed(self._sizes):
            start = self._continuations.get(tuple(token_ids[-size:]))
            if start is not None:
                return start
        return None


def copy_from(token_ids: Seq[int], start: int, num_tokens: int) -> tuple[int, ...]:
    """Return `num_tokens` tokens from `start`; past the end the copy repeats itself with that period."""
    period = len(token_ids) - start
    return tuple(token_ids[start + i % period] for i in range(num_tokens))

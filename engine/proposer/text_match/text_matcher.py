"""Drafts that cost nothing: continuations of a text's end, from the text itself or from another text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol
from weakref import WeakValueDictionary

from engine.batch.draft import NO_DRAFT, PREDICTION, Draft
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens
from protos.messages import SpeculationMethod
from protos.predicted_text import PredictedText, Prediction

# A continuation, and the number of context tokens that match.
TextMatch = tuple[tuple[int, ...], int]


class TextMatcher(Protocol):
    """Finds a draft for an open sequence immediately, with the length of its matching context.

    A match is a function of committed tokens and of other texts, so q is one-hot for every verifier.

    Attributes:
        source: The source of its drafts.
    """

    source: str

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


class _FollowedPrediction:
    """A sequence's prediction, and how far the output has been compared with it."""

    def __init__(self, sequence: RequestTokens, prediction: Prediction) -> None:
        self.text = PredictedText(prediction)
        self.num_compared = sequence.num_prompt_tokens
        self.num_agreed = 0  # tokens since the output last differed from the prediction

    def extend(self, token_ids: Seq[int]) -> None:
        self.num_compared += len(token_ids)
        for token_id in token_ids:
            before = self.text.position
            self.text.read((token_id,))
            is_agreed = before is not None and self.text.position == before + 1
            self.num_agreed = self.num_agreed + 1 if is_agreed else 0


class PredictionMatcher:
    """A `TextMatcher` that drafts from the request's prediction while the output agrees with it.

    A prediction must be independent of the verifier's noise. Except in `coupled` verification, a text sampled with the
    same seed would bias the output, so the ingress refuses a prediction together with a seed there.
    """

    source = PREDICTION

    def __init__(self) -> None:
        self._following: dict[str, _FollowedPrediction] = {}
        # One for all choices of a request. Not shared between tenants or salts: timing would reveal another's text.
        self._predictions: WeakValueDictionary[tuple[str, str, tuple[int, ...]], Prediction] = WeakValueDictionary()

    def is_for(self, sequence: RequestTokens) -> bool:
        return bool(sequence.request.prediction_token_ids)

    def open(self, sequence: RequestTokens) -> None:
        key = sequence.request.tenant, sequence.request.cache_salt, sequence.request.prediction_token_ids
        prediction = self._predictions.get(key)
        if prediction is None:
            prediction = self._predictions[key] = Prediction(sequence.request.prediction_token_ids)
        self._following[sequence.request_id] = _FollowedPrediction(sequence, prediction)

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        for sequence in sequences:
            following = self._following.get(sequence.request_id)
            if following is not None:
                following.extend(sequence.token_ids[following.num_compared :])

    def close(self, request_id: str) -> None:
        self._following.pop(request_id, None)

    def match(self, sequence: RequestTokens, max_tokens: int) -> TextMatch | None:
        """Return the next tokens of the prediction; None if the output has left it."""
        following = self._following.get(sequence.request_id)
        token_ids = following.text.next(max_tokens) if following is not None else ()
        if following is None or not token_ids:
            return None
        return token_ids, following.num_agreed


class NgramProposer:
    """Drafts the continuation of the latest earlier occurrence of the longest known suffix (Saxena 2023).

    Suffixes have `min_size` to `max_size` tokens. The cost of a step depends on its committed tokens, not the context.
    The draft is a function of the prefix, so q is one-hot for every verifier.
    """

    def __init__(self, min_size: int = 2, max_size: int = 4) -> None:
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
        return Draft(copy_from(sequence.token_ids, start, num_tokens), source=SpeculationMethod.NGRAM)


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

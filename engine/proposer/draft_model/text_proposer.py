"""Drafts of a model with a tokenizer of its own: it continues the text, and its text is encoded again for the target.

String-level exact match (arXiv:2502.05202): the draft model reads what is committed in its own tokens and says its
likeliest continuation; the target's tokens for that continuation are the draft. They are a function of the committed
tokens alone, so their distribution is one-hot and every verifier is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from engine.draft import NO_DRAFT, Draft
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.vocab_mapping.counts import TranslationCounts
from engine.proposer.vocab_mapping.text_reader import TextReader
from engine.proposer.vocab_mapping.vocabulary_pair import VocabularyPair
from engine.sequence.draft_query import DraftQuery, UnscheduledQuery
from engine.sequence.request_tokens import DraftRule, RequestTokens
from protos.messages import SamplingParams, VerifyMode

_WINDOW_TOKENS = 16  # of the target's, behind which a draft is encoded
_MAX_STRETCH = 4  # drafted tokens per token of the target's
_ENDLESS = 1 << 30
_LIKELIEST = SamplingParams(temperature=0.0, max_tokens=_ENDLESS)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A sequence of the target's as the draft model reads it; `sequence.token_ids` are those of `reader`."""

    reader: TextReader
    sequence: RequestTokens


class TextProposer:
    """Drafts through text with a `ModelProposer` that knows of no target; implements `Proposer`.

    Sampling parameters and grammars do not reach the draft model: they act where its drafts are verified.
    """

    def __init__(self, model: ModelProposer, pair: VocabularyPair) -> None:
        self._model = model
        self._pair = pair
        self._special_ids = pair.special_ids()
        self._end_ids = frozenset(pair.draft_tokens.eos_token_ids)
        self._readings: dict[str, _Reading] = {}
        self.counts = TranslationCounts()  # tokens that the draft model said; those of them whose text no draft has

    @property
    def model_version(self) -> str:
        """Names the draft's weights."""
        return self._model.model_version

    def check_integrity(self) -> None:
        """Assert the invariants of the draft model's pool; for tests, O(N)."""
        self._model.sequences.check_integrity()

    def open(self, sequence: RequestTokens) -> None:
        """Begin to read the sequence's text."""
        reader = TextReader(self._pair.target, self._pair.draft, self._special_ids)
        request = replace(
            sequence.request, prompt_token_ids=(), output_token_ids=(), sampling=_LIKELIEST, sample_index=0
        )
        draft_sequence = RequestTokens(request, DraftRule(0, VerifyMode.COUPLED))
        draft_sequence.token_ids = reader.token_ids
        self._readings[sequence.request_id] = _Reading(reader, draft_sequence)
        self._model.open(draft_sequence)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Draft in the draft's tokens, and translate."""
        asked = {each.sequence.request_id: own for each in queries if (own := self._own_query(each)) is not None}
        own_drafts = self._model.propose(list(asked.values())) if asked else []
        drafted = {request_id: draft.token_ids for request_id, draft in zip(asked, own_drafts, strict=True)}
        return [self._translate(query, drafted.get(query.sequence.request_id, ())) for query in queries]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Nothing to do: `propose` reads what was committed since."""

    def close(self, request_id: str) -> None:
        """Forget the sequence."""
        self._readings.pop(request_id, None)
        self._model.close(request_id)

    def _own_query(self, query: DraftQuery) -> DraftQuery | None:
        """The query in the draft's tokens; None while there is nothing that the draft could read."""
        reading = self._readings.get(query.sequence.request_id)
        if reading is None:
            return None
        self._model.rewind(query.sequence.request_id, reading.reader.read(query.sequence.token_ids))
        num_tokens = len(reading.sequence.token_ids)
        if num_tokens == 0:
            return None
        stretch = min(_MAX_STRETCH, num_tokens / len(query.sequence.token_ids))
        return UnscheduledQuery(reading.sequence, math.ceil(query.max_draft_tokens * stretch))

    def _translate(self, query: DraftQuery, drafted_ids: Seq[int]) -> Draft:
        """The target's tokens for what the draft says: its text up to where it ends, and the end."""
        if not drafted_ids:
            return NO_DRAFT
        num_drafted = next((i for i, each in enumerate(drafted_ids) if each in self._end_ids), len(drafted_ids))
        data = self._pair.draft.spell(drafted_ids[:num_drafted])
        reading = self._readings[query.sequence.request_id]
        token_ids = self._continue(query.sequence.token_ids, reading.reader.held, data)
        num_kept = len(_complete(data).encode()) if token_ids else 0
        num_lost = sum(end > num_kept for end in self._pair.draft.ends(drafted_ids[:num_drafted]))
        self.counts += TranslationCounts(num_drafted, num_lost)
        if num_drafted < len(drafted_ids) and (token_ids or not data):
            token_ids += self._pair.target_tokens.eos_token_ids[:1]
        return Draft(tuple(token_ids[: query.max_draft_tokens]))

    def _continue(self, committed: Seq[int], held: bytes, data: bytes) -> list[int]:
        """Tokens that add `data`, of which the bytes in `held` are committed already, to the committed tokens.

        They are the ones that the target would have for it behind its last tokens. Where those would have been other
        tokens themselves, because what follows belongs to the same word, it is encoded alone.
        """
        target = self._pair.target
        text = _complete(data)
        if not text or not text.encode().startswith(held):
            return []
        before = self._window(committed)[: -len(held) or None]
        token_ids = target.encode_after(before + held, before + text.encode())
        if token_ids is None and not held:
            token_ids = target.encode(text)
        return token_ids or []

    def _window(self, committed: Seq[int]) -> bytes:
        """The end of the committed text, from the start of a character and behind the last control token."""
        last = committed[-_WINDOW_TOKENS:]
        first = next((i for i in range(len(last), 0, -1) if last[i - 1] in self._special_ids), 0)
        data = self._pair.target.spell(last[first:])
        start = next((i for i, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
        return data[start:]


def _complete(data: bytes) -> str:
    """The text of `data` up to the first character that is broken off, or none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()

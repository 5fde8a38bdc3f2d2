"""Loads a draft model with any tokenizer, for a draft process; one with tokens of its own drafts through text."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.accounting.engine_stats import TranslationCounts
from engine.batch.draft import NO_DRAFT, Draft
from engine.config import CacheConfig, ModelConfig, SchedulerConfig
from engine.proposer.byte_vocabulary import TextReader
from engine.proposer.draft_model.ahead_drafter import AheadDrafter
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.translation import DraftVocabulary, SharedTokens, VocabularyPair, choose_vocabulary
from engine.sequence.batch import DraftQuery, UnscheduledQuery
from engine.sequence.sequence import DraftRule, RequestTokens
from protos.messages import SamplingParams, VerifyMode

_LIKELIEST = SamplingParams(temperature=0.0, max_tokens=1 << 30)


class TextProposer:
    """Drafts through text with a `ModelProposer` that knows no target; implements `Proposer`.

    String-level exact match (arXiv:2502.05202): the draft model gets the committed text in its own tokens and continues
    it greedily. The target's tokens of that continuation are the draft. They are a function of the committed tokens
    alone, so their distribution is one-hot and every verifier is exact. The draft model ignores sampling parameters and
    grammars; the verifier applies them.
    """

    def __init__(self, model: ModelProposer, pair: VocabularyPair) -> None:
        self._model = model
        self._pair = pair
        self._special_ids = pair.special_ids()
        self._end_ids = frozenset(pair.draft_tokens.eos_token_ids)
        # Each sequence in the draft's tokens; both `token_ids` are one list.
        self._texts: dict[str, tuple[TextReader, RequestTokens]] = {}
        self.counts = TranslationCounts()  # drafted tokens, and tokens whose text was lost

    @property
    def model_version(self) -> str:
        """The version of the draft's weights."""
        return self._model.model_version

    def check_integrity(self) -> None:
        """Assert the invariants of the draft model's pool; for tests, O(N)."""
        self._model.sequences.check_integrity()

    def open(self, sequence: RequestTokens) -> None:
        reader = TextReader(self._pair.target, self._pair.draft, self._special_ids)
        request = replace(
            sequence.request, prompt_token_ids=(), output_token_ids=(), sampling=_LIKELIEST, sample_index=0
        )
        draft_sequence = RequestTokens(request, DraftRule(0, VerifyMode.COUPLED))
        draft_sequence.token_ids = reader.token_ids
        self._texts[sequence.request_id] = reader, draft_sequence
        self._model.open(draft_sequence)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Draft in the draft model's tokens, and translate."""
        asked = {each.sequence.request_id: own for each in queries if (own := self._own_query(each)) is not None}
        own_drafts = self._model.propose(list(asked.values())) if asked else []
        drafted = {request_id: draft.token_ids for request_id, draft in zip(asked, own_drafts, strict=True)}
        return [self._translate(query, drafted.get(query.sequence.request_id, ())) for query in queries]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Do nothing: `propose` adds the newly committed tokens."""

    def close(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
        self._model.close(request_id)

    def _own_query(self, query: DraftQuery) -> DraftQuery | None:
        """Return the query in the draft's tokens; None while the text is empty."""
        text = self._texts.get(query.sequence.request_id)
        if text is None:
            return None
        reader, sequence = text
        self._model.rewind(query.sequence.request_id, reader.extend(query.sequence.token_ids))
        num_tokens = len(sequence.token_ids)
        if num_tokens == 0:
            return None
        stretch = min(4, num_tokens / len(query.sequence.token_ids))  # drafted tokens per token of the target, at most
        return UnscheduledQuery(sequence, math.ceil(query.max_draft_tokens * stretch))

    def _translate(self, query: DraftQuery, drafted_ids: Seq[int]) -> Draft:
        """Return the target's tokens for the drafted text, with the end token if the draft has ended."""
        if not drafted_ids:
            return NO_DRAFT
        num_drafted = next((i for i, each in enumerate(drafted_ids) if each in self._end_ids), len(drafted_ids))
        data = self._pair.draft.spell(drafted_ids[:num_drafted])
        reader, _ = self._texts[query.sequence.request_id]
        token_ids = self._continue(query.sequence.token_ids, reader.held, data)
        num_kept = len(_complete(data).encode()) if token_ids else 0
        num_lost = sum(end > num_kept for end in self._pair.draft.ends(drafted_ids[:num_drafted]))
        self.counts += TranslationCounts(num_drafted, num_lost)
        if num_drafted < len(drafted_ids) and (token_ids or not data):
            token_ids += self._pair.target_tokens.eos_token_ids[:1]
        return Draft(tuple(token_ids[: query.max_draft_tokens]))

    def _continue(self, committed: Seq[int], held: bytes, data: bytes) -> list[int]:
        """Return the target's tokens that continue the committed tokens with `data`; it begins with the bytes `held`.

        `held` is committed already. The text is encoded together with the last committed tokens. If that changes those
        tokens, as when `data` continues a word, the text is encoded alone.
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
        """Return the end of the committed text, after the last control token and from the start of a character."""
        last = committed[-16:]  # the draft is encoded with the target's last committed tokens
        first = next((i for i in range(len(last), 0, -1) if last[i - 1] in self._special_ids), 0)
        data = self._pair.target.spell(last[first:])
        start = next((i for i, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
        return data[start:]


def _complete(data: bytes) -> str:
    """Return the text of `data` up to its first incomplete character."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def load_drafter(
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    target_path: str,
    *,
    has_trees: bool = False,
    is_ahead: bool = False,
) -> tuple[ModelProposer | TextProposer, AheadDrafter | None]:
    """Load a draft model for the target at `target_path`; with `is_ahead` also its drafter ahead of verification.

    Raises:
        ConfigError: the model cannot be served, or does not fit the target.
    """
    choice = choose_vocabulary(target_path, model.path, needs_ids=is_ahead or has_trees)
    if choice.vocabulary is DraftVocabulary.TEXT:
        return TextProposer(ModelProposer.from_config(model, cache, scheduler), choice.require_pair()), None
    translation, tokenizer_path = None, None
    if choice.vocabulary is DraftVocabulary.INTERSECTION:
        translation, tokenizer_path = SharedTokens(choice.require_pair()), target_path
    vocab_size = choice.target_tokens.vocab_size
    proposer = ModelProposer.from_config(
        model,
        cache,
        scheduler,
        vocab_size,
        has_trees=has_trees,
        translation=translation,
        tokenizer_path=tokenizer_path,
    )
    return proposer, proposer.ahead_drafter() if is_ahead else None

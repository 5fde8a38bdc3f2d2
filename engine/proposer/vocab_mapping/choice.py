"""Chooses the mapping of a draft model's tokens to the target's, by the share of common tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.model.checkpoint.end_tokens import find_end_tokens
from engine.model.loader import load_config, model_folder, tokenizer_file
from engine.proposer.vocab_mapping.byte_vocabulary import ByteVocabulary, names_of, read_tokenizer
from engine.proposer.vocab_mapping.vocabulary_pair import (
    ModelTokens,
    VocabularyPair,
    are_names_of_one,
    are_sizes_of_one,
)
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_LEAST_COVERAGE = 0.6  # above it, drafts of shared tokens are at least as fast as text (bench/EXPERIMENTS.md)


class DraftVocabulary(StrEnum):
    """The mapping of a draft model's tokens to the target's."""

    SAME = "same"  # one tokenizer, equal ids
    INTERSECTION = "intersection"  # draft only tokens that both vocabularies have
    TEXT = "text"  # decode the draft's text and encode it again


@dataclass(frozen=True, slots=True)
class VocabularyChoice:
    """The chosen vocabulary; `pair` is None if both models have one tokenizer."""

    vocabulary: DraftVocabulary
    target_tokens: ModelTokens
    pair: VocabularyPair | None = None

    def require_pair(self) -> VocabularyPair:
        """Return the pair of a choice with two vocabularies."""
        assert self.pair is not None, "two vocabularies have a pair"
        return self.pair


@dataclass(frozen=True, slots=True)
class _TokenizedModel:
    """A model's tokens, and its tokenizer.json if it has one."""

    path: str
    tokens: ModelTokens
    file: Path | None

    @classmethod
    def at(cls, path: str) -> _TokenizedModel:
        return cls(path, _model_tokens(path), tokenizer_file(path))

    @property
    def names(self) -> dict[int, str]:
        """The names of the ids of the logits."""
        return names_of(read_tokenizer(self.require_file()), self.tokens.vocab_size)

    @property
    def vocabulary(self) -> ByteVocabulary:
        return ByteVocabulary.from_file(self.require_file(), self.tokens.vocab_size)

    def require_file(self) -> Path:
        assert self.file is not None, "models without a tokenizer are not compared"
        return self.file


def choose_vocabulary(target_path: str, draft_path: str, *, needs_ids: bool = False) -> VocabularyChoice:
    """Compare the tokenizers of two models, choose the mapping, and log the figures.

    Drafts of shared tokens alone are chosen if those cover most texts, or if the draft `needs_ids`: only chains in mode
    `sync` go through text. If one model has no tokenizer.json, equal ids are assumed to be equal tokens.

    Raises:
        ConfigError: the tokenizers cannot be compared.
    """
    target, draft = _TokenizedModel.at(target_path), _TokenizedModel.at(draft_path)
    if _is_one_vocabulary(target, draft):
        return VocabularyChoice(DraftVocabulary.SAME, target.tokens)
    pair = VocabularyPair(target.vocabulary, draft.vocabulary, target.tokens, draft.tokens)
    coverage = pair.coverage()
    has_ids = needs_ids or coverage >= _LEAST_COVERAGE
    chosen = DraftVocabulary.INTERSECTION if has_ids else DraftVocabulary.TEXT
    logger.info(
        "the draft has another tokenizer, translated by %s: tokens target=%d draft=%d shared=%d, coverage=%.3f, "
        "intersection from %.2f on, or for trees and mode async",
        *(chosen, len(pair.target.names), len(pair.draft.names), len(pair.shared_ids()), coverage, _LEAST_COVERAGE),
    )
    return VocabularyChoice(chosen, target.tokens, pair)


def _is_one_vocabulary(target: _TokenizedModel, draft: _TokenizedModel) -> bool:
    """True if equal ids are equal tokens in both models, by their tokenizer files.

    With one tokenizer the vocabulary sizes may differ by any padding of the embeddings. Without a tokenizer file only
    the sizes are compared.
    """
    if target.file is None or draft.file is None:
        if not are_sizes_of_one(draft.tokens.vocab_size, target.tokens.vocab_size):
            raise ConfigError(
                f"the draft's vocabulary has {draft.tokens.vocab_size} tokens and the target's "
                f"{target.tokens.vocab_size}; without a tokenizer.json of both they cannot be compared: use a "
                "draft with the target's tokenizer"
            )
        return True
    return target.file.read_bytes() == draft.file.read_bytes() or are_names_of_one(draft.names, target.names)


def _model_tokens(path: str) -> ModelTokens:
    """Load the tokens from the model's configuration, without its weights."""
    config = load_config(path).get_text_config()
    ends = find_end_tokens(model_folder(path), int(config.vocab_size), config.eos_token_id)
    return ModelTokens(int(config.vocab_size), _ids(config.bos_token_id), ends.token_ids)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)

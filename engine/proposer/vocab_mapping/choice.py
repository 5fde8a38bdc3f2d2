"""How a deployment's draft is translated: as it is told, or by what its tokenizer has in common with the target's."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transformers import AutoConfig, GenerationConfig

from engine.config import DraftVocabulary
from engine.model.loader import tokenizer_file
from engine.proposer.vocab_mapping.byte_vocabulary import ByteVocabulary, names_of, read_tokenizer
from engine.proposer.vocab_mapping.vocabulary_pair import (
    ModelTokens,
    VocabularyPair,
    are_names_of_one,
    are_sizes_of_one,
)
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_LEAST_COVERAGE = 0.6  # from here on drafts of shared tokens bring at least as much (docs/speculation.md)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, never `auto`; `pair` is None where two models of one tokenizer need no comparison."""

    vocabulary: DraftVocabulary
    target_tokens: ModelTokens
    pair: VocabularyPair | None = None

    def require_pair(self) -> VocabularyPair:
        assert self.pair is not None, "only the same vocabulary goes without"
        return self.pair


def choose_vocabulary(target_path: str, draft_path: str, wanted: DraftVocabulary) -> Choice:
    """Compare the tokenizers of two models and choose, and log the figures behind the choice.

    Where one of them has no tokenizer.json, ids are taken to mean the same.

    Raises:
        ConfigError: the tokenizers are not what `wanted` says, or cannot be compared.
    """
    target_tokens, draft_tokens = _model_tokens(target_path), _model_tokens(draft_path)
    files = [tokenizer_file(path) for path in (target_path, draft_path)]
    is_to_translate = wanted in (DraftVocabulary.INTERSECTION, DraftVocabulary.TEXT)
    texts = [file.read_bytes() for file in files if file is not None]
    if len(texts) < 2 and is_to_translate:
        path = target_path if files[0] is None else draft_path
        raise ConfigError(f"draft.vocabulary is {str(wanted)!r}, but {path!r} has no tokenizer.json to translate by")
    if len(texts) < 2 or (texts[0] == texts[1] and not is_to_translate):
        return Choice(DraftVocabulary.SAME, target_tokens)
    target_file, draft_file = (file for file in files if file is not None)
    is_same = are_sizes_of_one(draft_tokens.vocab_size, target_tokens.vocab_size) and are_names_of_one(
        names_of(read_tokenizer(draft_file), draft_tokens.vocab_size),
        names_of(read_tokenizer(target_file), target_tokens.vocab_size),
    )
    if is_same and not is_to_translate:
        return Choice(DraftVocabulary.SAME, target_tokens)
    pair = VocabularyPair(
        ByteVocabulary.from_file(target_file, target_tokens.vocab_size),
        ByteVocabulary.from_file(draft_file, draft_tokens.vocab_size),
        target_tokens,
        draft_tokens,
    )
    return Choice(_choose(pair, wanted), target_tokens, pair)


def _choose(pair: VocabularyPair, wanted: DraftVocabulary) -> DraftVocabulary:
    """Of two vocabularies that are not one, or shall not be taken for one."""
    num_shared, coverage = len(pair.shared_ids()), pair.coverage()
    if wanted is DraftVocabulary.SAME:
        raise ConfigError(
            f"draft.vocabulary is 'same', but of the target's {len(pair.target.names)} tokens and the draft's "
            f"{len(pair.draft.names)} only {num_shared} are the same; set it to 'intersection', 'text' or 'auto'"
        )
    chosen = wanted
    if wanted is DraftVocabulary.AUTO:
        is_covered = coverage >= _LEAST_COVERAGE
        chosen = DraftVocabulary.INTERSECTION if is_covered else DraftVocabulary.TEXT
    logger.info(
        "draft.vocabulary %s, wanted %s: tokens target=%d draft=%d shared=%d, coverage=%.3f, intersection from %.2f on",
        chosen,
        wanted,
        len(pair.target.names),
        len(pair.draft.names),
        num_shared,
        coverage,
        _LEAST_COVERAGE,
    )
    return chosen


def _model_tokens(path: str) -> ModelTokens:
    """From the model's configuration alone, without its weights."""
    config = AutoConfig.from_pretrained(path).get_text_config()
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # it has none of its own
        eos = config.eos_token_id
    return ModelTokens(int(config.vocab_size), _ids(config.bos_token_id), _ids(eos))


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)

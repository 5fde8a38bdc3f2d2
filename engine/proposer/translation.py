"""Translation token by token, for a draft model that drafts in the target's ids, and the choice of that or of text.

All choices of a draft (penalties, masks, noise, distributions) use logits over the target's vocabulary. Only the inputs
of the draft model are in its own ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from engine.accounting.engine_stats import TranslationCounts
from engine.model.checkpoint.end_tokens import find_end_tokens
from engine.model.loader import load_config, model_folder, tokenizer_file
from engine.proposer.byte_vocabulary import ByteVocabulary, names_of, read_tokenizer
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_PADDING_SHARE = 0.01  # of the vocabulary: most padding between two sizes of one tokenizer
_LEAST_COVERAGE = 0.6  # above it, drafts of shared tokens are at least as fast as text (bench/EXPERIMENTS.md)


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """A model's vocabulary size, its ids that begin and end a text, and its tokenizer.json if it has one."""

    vocab_size: int
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    file: Path | None = None

    @classmethod
    def at(cls, path: str) -> ModelTokens:
        """Read the model's configuration, without its weights."""
        config = load_config(path).get_text_config()
        vocab_size = int(config.vocab_size)
        eos_token_ids, _ = find_end_tokens(model_folder(path), vocab_size, getattr(config, "eos_token_id", None))
        return cls(vocab_size, _ids(getattr(config, "bos_token_id", None)), eos_token_ids, tokenizer_file(path))

    def names(self) -> dict[int, str]:
        """Return the names of the ids of the logits."""
        return names_of(read_tokenizer(self.require_file()), self.vocab_size)

    def vocabulary(self) -> ByteVocabulary:
        """Return the tokens with their bytes. Raises ConfigError if they have none."""
        return ByteVocabulary.from_file(self.require_file(), self.vocab_size)

    def require_file(self) -> Path:
        assert self.file is not None, "models without a tokenizer are not compared"
        return self.file


@dataclass(frozen=True, slots=True)
class VocabularyPair:
    """The tokens of two models; ids outside a model's logits are ignored."""

    target: ByteVocabulary
    draft: ByteVocabulary
    target_tokens: ModelTokens
    draft_tokens: ModelTokens

    def shared_ids(self) -> dict[int, int]:
        """Map draft ids to target ids with the same bytes or the same role, one to one."""
        ids = {
            draft_id: self.target.id_of[data]
            for data, draft_id in self.draft.id_of.items()
            if data in self.target.id_of
        }
        for target_id, draft_ids in self.special_ids().items():
            if len(draft_ids) == 1 and draft_ids[0] in self.draft.special_ids and draft_ids[0] not in ids:
                ids[draft_ids[0]] = target_id
        sizes = self.draft_tokens.vocab_size, self.target_tokens.vocab_size
        return {theirs: ours for theirs, ours in ids.items() if theirs < sizes[0] and ours < sizes[1]}

    def special_ids(self) -> Mapping[int, tuple[int, ...]]:
        """Map each control token of the target to the draft's tokens.

        It is the draft's token with the same name, or with the same role at the beginning or end of a text. For other
        control tokens, which chat templates use, it is the name as text.
        """
        by_name = {self.draft.names[token_id]: token_id for token_id in self.draft.special_ids}
        read: dict[int, tuple[int, ...]] = {}
        for role in ("bos_token_ids", "eos_token_ids"):
            theirs: tuple[int, ...] = getattr(self.draft_tokens, role)
            read |= dict.fromkeys(getattr(self.target_tokens, role), theirs[:1])
        for token_id in sorted(self.target.special_ids):
            name = self.target.names[token_id]
            if name in by_name:
                read[token_id] = (by_name[name],)
            elif token_id not in read:
                read[token_id] = tuple(self.draft.encode(name))
        return read

    def coverage(self) -> float:
        """Estimate the share of the target's text that consists of shared tokens, 0 to 1.

        The ids of a byte pair encoding follow the order of its merges, frequent tokens first. So frequencies are
        estimated by Zipf's law, with the id as the rank.
        """
        shared = set(self.shared_ids().values())
        spelled = sorted(self.target.id_of.values())
        # The first tokens of a BPE, mostly single bytes, are not its most frequent ones.
        weights = {token_id: 1.0 / (100 + rank) for rank, token_id in enumerate(spelled)}
        return sum(weights[token_id] for token_id in spelled if token_id in shared) / max(1e-9, sum(weights.values()))


def are_names_of_one(draft_names: Mapping[int, str], target_names: Mapping[int, str]) -> bool:
    """True if almost all ids have the same name; models of a family may differ by a few control tokens."""
    num_different = sum(draft_names.get(token_id) != name for token_id, name in target_names.items())
    num_different += len(draft_names.keys() - target_names.keys())
    return num_different <= _MAX_PADDING_SHARE * len(target_names)


def are_sizes_of_one(draft_size: int, target_size: int) -> bool:
    """True if two models with these numbers of logits may have one tokenizer."""
    return abs(draft_size - target_size) <= _MAX_PADDING_SHARE * target_size


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


def choose_vocabulary(target_path: str, draft_path: str, *, needs_ids: bool = False) -> VocabularyChoice:
    """Compare the tokenizers of two models, choose the mapping, and log the figures.

    Drafts of shared tokens alone are chosen if those cover most texts, or if the draft `needs_ids`: only chains in mode
    `sync` go through text. If one model has no tokenizer.json, equal ids are assumed to be equal tokens.

    Raises:
        ConfigError: the tokenizers cannot be compared.
    """
    target, draft = ModelTokens.at(target_path), ModelTokens.at(draft_path)
    if _is_one_vocabulary(target, draft):
        return VocabularyChoice(DraftVocabulary.SAME, target)
    pair = VocabularyPair(target.vocabulary(), draft.vocabulary(), target, draft)
    coverage = pair.coverage()
    has_ids = needs_ids or coverage >= _LEAST_COVERAGE
    chosen = DraftVocabulary.INTERSECTION if has_ids else DraftVocabulary.TEXT
    logger.info(
        "the draft has another tokenizer, translated by %s: tokens target=%d draft=%d shared=%d, coverage=%.3f, "
        "intersection from %.2f on, or for trees and mode async",
        *(chosen, len(pair.target.names), len(pair.draft.names), len(pair.shared_ids()), coverage, _LEAST_COVERAGE),
    )
    return VocabularyChoice(chosen, target, pair)


def _is_one_vocabulary(target: ModelTokens, draft: ModelTokens) -> bool:
    """True if equal ids are equal tokens in both models, by their tokenizer files.

    With one tokenizer the vocabulary sizes may differ by any padding of the embeddings. Without a tokenizer file only
    the sizes are compared.
    """
    if target.file is None or draft.file is None:
        if not are_sizes_of_one(draft.vocab_size, target.vocab_size):
            raise ConfigError(
                f"the draft's vocabulary has {draft.vocab_size} tokens and the target's "
                f"{target.vocab_size}; without a tokenizer.json of both they cannot be compared: use a "
                "draft with the target's tokenizer"
            )
        return True
    return target.file.read_bytes() == draft.file.read_bytes() or are_names_of_one(draft.names(), target.names())


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


class SameVocabulary:
    """One vocabulary; only the padding of the logits may differ."""

    counts = TranslationCounts()  # of the tokens lost so far

    def __init__(self, draft_size: int, target_size: int) -> None:
        self._draft_size = draft_size
        self._target_size = target_size

    @property
    def is_identity(self) -> bool:
        """True if every id of the target is the same token in the draft."""
        return self._draft_size >= self._target_size

    def align(self, logits: Tensor) -> Tensor:
        """Map logits `[R, V of the draft]` to `[R, V of the target]`, with -inf for tokens that the draft lacks."""
        num_missing = self._target_size - logits.shape[1]
        if num_missing > 0:
            return torch.nn.functional.pad(logits, (0, num_missing), value=float("-inf"))
        return logits[:, : self._target_size]

    def feed(self, token_ids: Tensor) -> Tensor:
        """Return the draft's ids of drafted tokens, `[B] int64`."""
        return token_ids

    def to_draft(self, token_ids: Seq[int]) -> list[int]:
        """Return the draft's tokens for the target's: one for each drafted token, any number for other tokens."""
        # Ids that are only padding of the target's embedding become 0; texts never have them.
        return [token_id if token_id < self._draft_size else 0 for token_id in token_ids]


class SharedTokens:
    """Drafts only tokens that both vocabularies have (token-level intersection, arXiv:2502.05202).

    The draft's distribution is masked to shared tokens and renormalised before the draw, so the verifier gets the
    distribution that was drawn from. The draft model's input keeps the target's token borders: one token for a shared
    token, and the draft's spelling of the same bytes for any other token. So the input only grows, like the target's.
    """

    is_identity = False

    def __init__(self, pair: VocabularyPair) -> None:
        """Raises ConfigError if the vocabularies share no token."""
        self._draft = pair.draft
        self._target = pair.target
        self._target_size = pair.target_tokens.vocab_size
        self._draft_size = pair.draft_tokens.vocab_size
        shared = pair.shared_ids()
        if not shared:
            raise ConfigError("draft and target have no token in common, as trees and mode 'async' need; remove them")
        self._draft_ids = torch.tensor(list(shared.keys()))
        self._target_ids = torch.tensor(list(shared.values()))
        self._fed = torch.zeros(self._target_size, dtype=torch.int64)
        self._fed[self._target_ids] = self._draft_ids
        self._is_shared = torch.zeros(self._draft_size, dtype=torch.bool)
        self._is_shared[self._draft_ids] = True
        self._draft_ids_of: dict[int, tuple[int, ...]] = {ours: (theirs,) for theirs, ours in shared.items()}
        self._specials: Mapping[int, tuple[int, ...]] = pair.special_ids()
        self._num_tokens = 0
        self._num_lost = torch.zeros((), dtype=torch.int64)

    @property
    def counts(self) -> TranslationCounts:
        return TranslationCounts(self._num_tokens, int(self._num_lost))

    def align(self, logits: Tensor) -> Tensor:
        self._move_to(logits.device)
        self._num_tokens += len(logits)
        self._num_lost += (~self._is_shared[logits.argmax(dim=1)]).sum()
        aligned = logits.new_full((len(logits), self._target_size), float("-inf"))
        aligned[:, self._target_ids] = logits[:, self._draft_ids]
        return aligned

    def feed(self, token_ids: Tensor) -> Tensor:
        return self._fed[token_ids.to(self._fed.device)]

    def to_draft(self, token_ids: Seq[int]) -> list[int]:
        return [each for token_id in token_ids for each in self._to_draft_ids(token_id)]

    def _to_draft_ids(self, token_id: int) -> tuple[int, ...]:
        """Return the draft's spelling of a token, computed at its first use: most tokens are never used."""
        if token_id not in self._draft_ids_of:
            theirs = self._specials.get(token_id)
            if theirs is None:
                theirs = tuple(self._draft.encode_bytes(self._target.bytes_of(token_id)))
            self._draft_ids_of[token_id] = tuple(each for each in theirs if each < self._draft_size)
        return self._draft_ids_of[token_id]

    def _move_to(self, device: torch.device) -> None:
        """Keep the tables where the logits are; ids follow them, so that no table is ever copied back."""
        if self._fed.device != device:
            self._draft_ids, self._target_ids = self._draft_ids.to(device), self._target_ids.to(device)
            self._fed, self._is_shared = self._fed.to(device), self._is_shared.to(device)
            self._num_lost = self._num_lost.to(device)


Translation = SameVocabulary | SharedTokens

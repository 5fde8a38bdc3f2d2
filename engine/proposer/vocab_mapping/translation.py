"""Translation token by token, for a draft model that computes in its own ids and drafts in the target's.

Everything that chooses a draft (penalties, masks, noise, distributions) works on logits over the target's vocabulary;
only what the draft model is fed is written in its own ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from engine.proposer.vocab_mapping.counts import TranslationCounts
from engine.proposer.vocab_mapping.vocabulary_pair import VocabularyPair
from protos.errors import ConfigError


class Translation(Protocol):
    """From the draft's ids to the target's and back."""

    @property
    def is_identity(self) -> bool:
        """Every id of the target's means the same to the draft."""

    @property
    def counts(self) -> TranslationCounts:
        """Tokens lost so far; none where the vocabularies are one."""

    def align(self, logits: Tensor) -> Tensor:
        """[R, V of the draft] -> [R, V of the target]; -inf for tokens that the draft cannot say."""

    def feed(self, token_ids: Tensor) -> Tensor:
        """The draft's ids of drafted tokens, `[B] int64`."""

    def read(self, token_ids: Seq[int]) -> list[int]:
        """Return the draft's tokens for the target's: one for each that was drafted, any number for others."""


class SameVocabulary:
    """One tokenizer; only the padding of the logits may differ."""

    counts = TranslationCounts()

    def __init__(self, draft_size: int, target_size: int) -> None:
        self._draft_size = draft_size
        self._target_size = target_size

    @property
    def is_identity(self) -> bool:
        return self._draft_size >= self._target_size

    def align(self, logits: Tensor) -> Tensor:
        num_missing = self._target_size - logits.shape[1]
        if num_missing > 0:
            return torch.nn.functional.pad(logits, (0, num_missing), value=float("-inf"))
        return logits[:, : self._target_size]

    def feed(self, token_ids: Tensor) -> Tensor:
        return token_ids

    def read(self, token_ids: Seq[int]) -> list[int]:
        """Padding ids that only the target's embedding has become another id: no text has them."""
        return [token_id if token_id < self._draft_size else 0 for token_id in token_ids]


class SharedTokens:
    """Drafts are made of the tokens that both vocabularies have (token-level intersection, arXiv:2502.05202).

    The draft's distribution is masked to them and renormalised before anything is drawn from it, so the distribution
    that goes along is the one that was drawn from. What the draft reads has the target's borders of tokens: one token
    for a shared one, for others its own spelling of the same bytes. So it only ever grows, as the target's tokens do.
    """

    is_identity = False

    def __init__(self, pair: VocabularyPair) -> None:
        """Raises ConfigError where the vocabularies share no token."""
        self._draft = pair.draft
        self._target = pair.target
        self._target_size = pair.target_tokens.vocab_size
        self._draft_size = pair.draft_tokens.vocab_size
        shared = pair.shared_ids()
        if not shared:
            raise ConfigError("draft and target have no token in common; set draft.vocabulary to 'text'")
        self._draft_ids = torch.tensor(list(shared.keys()))
        self._target_ids = torch.tensor(list(shared.values()))
        self._fed = torch.zeros(self._target_size, dtype=torch.int64)
        self._fed[self._target_ids] = self._draft_ids
        self._is_shared = torch.zeros(self._draft_size, dtype=torch.bool)
        self._is_shared[self._draft_ids] = True
        self._read: dict[int, tuple[int, ...]] = {ours: (theirs,) for theirs, ours in shared.items()}
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
        self._move_to(token_ids.device)
        return self._fed[token_ids]

    def read(self, token_ids: Seq[int]) -> list[int]:
        return [each for token_id in token_ids for each in self._read_one(token_id)]

    def _read_one(self, token_id: int) -> tuple[int, ...]:
        """Spelled when it first comes up; a vocabulary has many tokens that never do."""
        if token_id not in self._read:
            theirs = self._specials.get(token_id)
            if theirs is None:
                theirs = tuple(self._draft.encode_bytes(self._target.bytes_of(token_id)))
            self._read[token_id] = tuple(each for each in theirs if each < self._draft_size)
        return self._read[token_id]

    def _move_to(self, device: torch.device) -> None:
        if self._fed.device != device:
            self._draft_ids, self._target_ids = self._draft_ids.to(device), self._target_ids.to(device)
            self._fed, self._is_shared = self._fed.to(device), self._is_shared.to(device)
            self._num_lost = self._num_lost.to(device)

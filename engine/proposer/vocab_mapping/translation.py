"""Translation token by token, for a draft model that computes its own ids and drafts in the target's ids.

All choices of a draft (penalties, masks, noise, distributions) use logits over the target's vocabulary. Only the inputs
of the draft model are in its own ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.accounting.engine_stats import TranslationCounts
from engine.proposer.vocab_mapping.choice import VocabularyPair
from protos.errors import ConfigError


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

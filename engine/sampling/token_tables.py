"""Caches tensors of the tokens that a request names, for all its steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch.indexing import upload
from engine.sampling.logits_row import LogitsRow
from protos.messages import SamplingParams

_NUM_KEPT = 512  # cached requests, each with the target's and the draft's vocabulary; evicted ones are rebuilt


class Bias(NamedTuple):
    """The entries of a `logit_bias` within the vocabulary, in order. Both tensors are `[E]`."""

    token_ids: Tensor  # int64
    values: Tensor


class _TrieNode:
    """A node in the trie of reversed bad words: the tokens forbidden after it, and its children by previous token."""

    __slots__ = ("forbidden_ids", "parents")

    def __init__(self) -> None:
        self.forbidden_ids: list[int] = []
        self.parents: dict[int, _TrieNode] = {}


class BadWords:
    """The bad words of a request. One walk over the prefix finds the forbidden tokens of all words.

    `always_ids` are the words of one token, `[A] int64`.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], num_tokens: int, device: torch.device) -> None:
        self._root = _TrieNode()
        for word in words:
            if word and word[-1] < num_tokens:
                self._insert(word)
        self.always_ids = upload(self._root.forbidden_ids, torch.int64, device)

    def _insert(self, word: tuple[int, ...]) -> None:
        node = self._root
        for token_id in reversed(word[:-1]):
            node = node.parents.setdefault(token_id, _TrieNode())
        node.forbidden_ids.append(word[-1])

    def completions(self, row: LogitsRow) -> Iterator[int]:
        """Yield the last token of each longer word whose other tokens end the row's prefix."""
        node: _TrieNode | None = self._root
        for token_id in chain(reversed(row.draft_ids), reversed(row.token_ids)):
            assert node is not None
            node = node.parents.get(token_id)
            if node is None:
                return
            yield from node.forbidden_ids


class _Identity:
    """A key compared by identity. It keeps its subject alive, so the id is not reused."""

    __slots__ = ("subject",)

    def __init__(self, subject: SamplingParams) -> None:
        self.subject = subject

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.subject is other.subject

    def __hash__(self) -> int:
        return id(self.subject)


def bias_of(sampling: SamplingParams, like: Tensor) -> Bias:
    """Return the bias of a request for scores `[R, V]` such as `like`. Created on the first call."""
    return _bias(_Identity(sampling), like.shape[1], like.dtype, like.device)


def bad_words_of(sampling: SamplingParams, like: Tensor) -> BadWords:
    """Return the bad words of a request for scores `[R, V]` such as `like`. Created on the first call."""
    return _bad_words(_Identity(sampling), like.shape[1], like.device)


@lru_cache(_NUM_KEPT)
def _bias(key: _Identity, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Bias:
    known = [(token_id, bias) for token_id, bias in key.subject.logit_bias if token_id < num_tokens]
    token_ids = upload([token_id for token_id, _ in known], torch.int64, device)
    return Bias(token_ids, upload([bias for _, bias in known], dtype, device))


@lru_cache(_NUM_KEPT)
def _bad_words(key: _Identity, num_tokens: int, device: torch.device) -> BadWords:
    return BadWords(key.subject.bad_words, num_tokens, device)

"""The tokens that a request names, made ready once for all of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from engine.indexing import upload
from engine.sampling.logits_row import LogitsRow
from protos.messages import SamplingParams

_NUM_KEPT = 512  # requests of two vocabularies, target's and draft's; one that falls out is made again


class Bias(NamedTuple):
    """The entries of a `logit_bias` that are in the vocabulary, in order: both tensors are `[E]`."""

    token_ids: Tensor  # int64
    values: Tensor


class _Node:
    """A place in the trie of bad words read backwards: what is forbidden behind it, and the tokens before it."""

    __slots__ = ("forbidden_ids", "parents")

    def __init__(self) -> None:
        self.forbidden_ids: list[int] = []
        self.parents: dict[int, _Node] = {}


class BadWords:
    """The bad words of a request; the tokens they forbid after a prefix cost one walk, however many there are.

    `always_ids` are those of one token, `[A] int64`.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], num_tokens: int, device: torch.device) -> None:
        self._root = _Node()
        for word in words:
            if word and word[-1] < num_tokens:
                self._insert(word)
        self.always_ids = upload(self._root.forbidden_ids, torch.int64, device)

    def _insert(self, word: tuple[int, ...]) -> None:
        node = self._root
        for token_id in reversed(word[:-1]):
            node = node.parents.setdefault(token_id, _Node())
        node.forbidden_ids.append(word[-1])

    def completions(self, row: LogitsRow) -> Iterator[int]:
        """Yield the last tokens of the longer words that the row's prefix has begun."""
        node: _Node | None = self._root
        for token_id in chain(reversed(row.draft_ids), reversed(row.token_ids)):
            assert node is not None
            node = node.parents.get(token_id)
            if node is None:
                return
            yield from node.forbidden_ids


class _Identity:
    """A key that equals itself alone; it keeps its subject alive, so that no other gets its id."""

    __slots__ = ("subject",)

    def __init__(self, subject: SamplingParams) -> None:
        self.subject = subject

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.subject is other.subject

    def __hash__(self) -> int:
        return id(self.subject)


def bias_of(sampling: SamplingParams, like: Tensor) -> Bias:
    """Return the bias of a request for scores `[R, V]` like these; made when it is asked for the first time."""
    return _bias(_Identity(sampling), like.shape[1], like.dtype, like.device)


def bad_words_of(sampling: SamplingParams, like: Tensor) -> BadWords:
    """Return the bad words of a request for scores `[R, V]` like these; made when asked for the first time."""
    return _bad_words(_Identity(sampling), like.shape[1], like.device)


@lru_cache(_NUM_KEPT)
def _bias(key: _Identity, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Bias:
    known = [(token_id, bias) for token_id, bias in key.subject.logit_bias if token_id < num_tokens]
    token_ids = upload([token_id for token_id, _ in known], torch.int64, device)
    return Bias(token_ids, upload([bias for _, bias in known], dtype, device))


@lru_cache(_NUM_KEPT)
def _bad_words(key: _Identity, num_tokens: int, device: torch.device) -> BadWords:
    return BadWords(key.subject.bad_words, num_tokens, device)

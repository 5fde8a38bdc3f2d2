"""A model of twenty lines: its KV is the token ids themselves, so reading a wrong block is seen at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from engine.batch import ScheduledSequence
from engine.draft import Draft
from engine.kv_move import KVMove
from engine.sequence import Sequence
from engine.span import Span


class PagedTokens:
    """A KV pool that remembers which token was written to each slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._slots: list[int | None] = [None] * (num_blocks * block_size)

    def write(self, span: Span) -> None:
        for offset, token_id in enumerate(span.token_ids):
            self._slots[self._slot(span, span.start + offset)] = token_id

    def read(self, span: Span, length: int) -> tuple[int | None, ...]:
        """What attention would see at place `length - 1` of the span's sequence."""
        return tuple(self._slots[self._slot(span, place)] for place in _visible(span, length - 1))

    def move(self, move: KVMove) -> None:
        moved = [self._slots[move.slot(place, self.block_size)] for place in move.from_places]
        for place, token_id in zip(move.to_places, moved, strict=True):
            self._slots[move.slot(place, self.block_size)] = token_id

    def _slot(self, span: Span, position: int) -> int:
        return span.block_table[position // self.block_size] * self.block_size + position % self.block_size


def _visible(span: Span, place: int) -> list[int]:
    """Places up to `place`; in a tree those before it, and the node's ancestors."""
    first = span.end - len(span.parents)
    path = []
    while place >= first:
        path.append(place)
        parent = span.parents[place - first]
        place = first + parent if parent >= 0 else first - 1
    return [*range(place + 1), *reversed(path)]


def logits_after(prefix: Seq[int | None], vocab_size: int) -> Tensor:
    """Logits `[V] float32`, V at most 32, that depend on every token of the prefix."""
    digest = blake2b(repr(tuple(prefix)).encode()).digest()
    return torch.tensor([int.from_bytes(digest[2 * i : 2 * i + 2]) / 8192 for i in range(vocab_size)])


class FakeRunner:
    """Stands where `ModelRunner` does; `spans` is what it was last asked for."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 16) -> None:
        self.vocab_size = vocab_size
        self.spans: list[Span] = []
        self._kv = PagedTokens(num_blocks, block_size)

    def forward(self, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        if input_ids is not None:
            fed = iter(input_ids.tolist())
            spans = [replace(span, token_ids=[next(fed) for _ in span.token_ids]) for span in spans]
        self.spans = list(spans)
        for span in spans:
            self._kv.write(span)
        rows = [
            logits_after(self._kv.read(span, span.end - behind), self.vocab_size)
            for span in spans
            for behind in reversed(range(span.num_logits))
        ]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def move(self, moves: Seq[KVMove]) -> None:
        for move in moves:
            self._kv.move(move)


class ScriptedProposer:
    """Proposes what `draft_of(sequence, max_tokens)` says and remembers what it was told."""

    def __init__(self, draft_of: Callable[[Sequence, int], Iterable[int]]) -> None:
        self._draft_of = draft_of
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.committed: list[str] = []

    def open(self, sequence: Sequence) -> None:
        self.opened.append(sequence.request_id)

    def propose(self, shares: Seq[ScheduledSequence]) -> list[Draft]:
        return [Draft(tuple(self._draft_of(share.sequence, share.max_draft_tokens))) for share in shares]

    def commit(self, sequences: Seq[Sequence]) -> None:
        self.committed += [sequence.request_id for sequence in sequences]

    def close(self, request_id: str) -> None:
        self.closed.append(request_id)

"""Earlier occurrences of the last tokens of a text, and their continuations: a suffix tree with implicit nodes.

In a suffix tree the occurrences of a suffix are the leaves below its node. Here chains of equal n-grams, as in DEFLATE
(RFC 1951), give the occurrences. So adding a token, or forgetting the oldest one, costs a few table entries instead of
a path of nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

MAX_MATCH = 16  # tokens of context that are compared
SEPARATOR = -1  # between two texts; equals no token

_SIZES = (1, 2, 4)  # sizes of n-grams; a long one has fewer occurrences to compare
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An earlier occurrence of the end of a text.

    The `match_len` tokens before `position` equal the text's last tokens, and the continuation begins at `position`.
    `rank` is the number of later occurrences of the same n-gram. An occurrence is valid until the index gets more
    tokens.
    """

    index: SuffixIndex
    position: int
    match_len: int
    rank: int

    def follower(self, drafted_ids: Seq[int]) -> int:
        """Return the token of the continuation after `drafted_ids`, or SEPARATOR.

        Past the end of the index the text continues with the drafted tokens, which repeats a period.
        """
        return self.index.token_at(self.position + len(drafted_ids), drafted_ids)


class _Chains:
    """The places of all n-grams of one size, each linked to the previous equal one; an n-gram starts at its place."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.heads: dict[int, int] = {}  # hash of an n-gram -> its latest place
        self.previous: list[int] = []  # by place modulo capacity

    def extend(self, tokens: Seq[int], text_start: int) -> None:
        """Add the new n-grams of `tokens`; only for an index that has forgotten nothing.

        An n-gram that begins before `text_start` is not added, since it overlaps the previous text.
        """
        heads, previous, first = self.heads, self.previous, len(self.previous)
        ngrams = zip(*(tokens[first + offset :] for offset in range(self.size)), strict=False)
        for place, key in enumerate(map(hash, ngrams), first):
            previous.append(heads.get(key, _NOWHERE) if place >= text_start else _NOWHERE)
            if place >= text_start:
                heads[key] = place


class SuffixIndex:
    """The last `capacity` tokens of one or more texts; by default all tokens.

    Positions count all tokens ever added. The index holds positions [start, end), and its memory is proportional to
    them.
    """

    def __init__(self, capacity: int = sys.maxsize) -> None:
        self.start = 0
        self.end = 0
        self._capacity = capacity
        self._text_start = 0
        self._tokens: list[int] = []  # by position modulo capacity
        self._chains = [_Chains(size) for size in _SIZES]

    def __len__(self) -> int:
        return self.end - self.start

    def extend(self, token_ids: Seq[int]) -> None:
        """Add tokens to the current text; the cost does not depend on the size of the index."""
        if self.end + len(token_ids) <= self._capacity:
            self._tokens += token_ids
            self.end += len(token_ids)
            for chains in self._chains:
                chains.extend(self._tokens, self._text_start)
            return
        for token_id in token_ids:
            self._append(token_id)

    def end_text(self) -> None:
        """End the current text; no match and no continuation crosses its end."""
        self._text_start = self.end + 1
        self._append(SEPARATOR)

    def occurrences(self, suffix: Seq[int]) -> list[Occurrence]:
        """Return the latest occurrences of the end of `suffix`, compared over at most MAX_MATCH tokens.

        Each n-gram size gives up to four, the longest size first.
        """
        suffix = suffix[-MAX_MATCH:]
        found: dict[int, Occurrence] = {}
        for chains in reversed(self._chains):
            for rank, position in enumerate(self._positions(chains, suffix)):
                if position not in found and (length := self._match_len(suffix, position)) >= chains.size:
                    found[position] = Occurrence(self, position, length, rank)
        return list(found.values())

    def token_at(self, position: int, continuation: Seq[int]) -> int:
        """Return the token at a position; `continuation` follows the end."""
        if position >= self.end:
            return continuation[position - self.end]
        return self._tokens[position % self._capacity]

    def _append(self, token_id: int) -> None:
        if len(self) == self._capacity:
            self._forget_first()
        _put(self._tokens, self.end % self._capacity, token_id)
        self.end += 1
        for chains in self._chains:
            self._link(chains, self.end - chains.size)

    def _link(self, chains: _Chains, place: int) -> None:
        """Add the n-gram that the latest token completes, if it is within the current text and still held."""
        previous = _NOWHERE
        if place >= self._text_start and place >= self.start:
            key = self._key(place, chains.size)
            previous = chains.heads.get(key, _NOWHERE)
            chains.heads[key] = place
        if place >= 0:
            _put(chains.previous, place % self._capacity, previous)

    def _forget_first(self) -> None:
        for chains in self._chains:
            key = self._key(self.start, chains.size)
            if chains.heads.get(key) == self.start:
                del chains.heads[key]
        self.start += 1

    def _key(self, place: int, size: int) -> int:
        return hash(tuple([self._tokens[at % self._capacity] for at in range(place, min(place + size, self.end))]))

    def _positions(self, chains: _Chains, suffix: Seq[int]) -> Iterator[int]:
        """Yield the positions after the latest occurrences of the suffix's last n-gram, hash collisions included."""
        if len(suffix) < chains.size:
            return
        place = chains.heads.get(hash(tuple(suffix[-chains.size :])), _NOWHERE)
        num_found = 0
        while place >= self.start and num_found < 4:
            if place + chains.size < self.end:  # the end of the text itself has no follower yet
                num_found += 1
                yield place + chains.size
            place = chains.previous[place % self._capacity]

    def _match_len(self, suffix: Seq[int], position: int) -> int:
        """Return the number of tokens before `position` that equal the end of the suffix."""
        length = 0
        while length < len(suffix) and position - length > self.start:
            if self._tokens[(position - length - 1) % self._capacity] != suffix[-1 - length]:
                break
            length += 1
        return length


def _put(buffer: list[int], index: int, value: int) -> None:
    if index == len(buffer):
        buffer.append(value)
    else:
        buffer[index] = value

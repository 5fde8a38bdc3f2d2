"""Earlier occurrences of the last tokens of a text, and what followed: a suffix tree that finds its nodes on demand.

The occurrences of a suffix are the leaves under its node, and those that go on with a token are its children's.
Chains of equal n-grams, as in DEFLATE (RFC 1951), give the occurrences, so a new token costs a few table entries
instead of a path of nodes, and forgetting the oldest one costs the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

MAX_MATCH = 16  # tokens of context that can tell occurrences apart
SEPARATOR = -1  # between two texts; equals no token

_SIZES = (1, 2, 4)  # a long suffix is looked up by a long n-gram: it has fewer occurrences to sort out
_MAX_OCCURRENCES = 4  # of each size: the latest ones
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A place where the end of a text occurred before.

    The `match_len` tokens before `position` are the text's last ones, and what follows begins there. `rank` is the
    number of later places with the same n-gram. It is valid until the index takes in another token.
    """

    index: SuffixIndex
    position: int
    match_len: int
    rank: int

    def follower(self, drafted_ids: Seq[int]) -> int:
        """Return the token behind the place and as many more as are drafted, or SEPARATOR.

        Past the end of all that is known the text goes on with what is drafted, as a period does.
        """
        return self.index.token_at(self.position + len(drafted_ids), drafted_ids)


class _Chains:
    """The places of all n-grams of one size, each linked to the one before it; a place is where the n-gram starts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.heads: dict[int, int] = {}  # hash of an n-gram -> its latest place
        self.previous: list[int] = []  # by place modulo capacity

    def extend(self, tokens: Seq[int], text_start: int) -> None:
        """Note all n-grams of `tokens` that are not noted yet, for an index that has forgotten nothing.

        Those that begin before `text_start` are none, for they reach into the text before.
        """
        heads, previous, first = self.heads, self.previous, len(self.previous)
        ngrams = zip(*(tokens[first + offset :] for offset in range(self.size)), strict=False)
        for place, key in enumerate(map(hash, ngrams), first):
            previous.append(heads.get(key, _NOWHERE) if place >= text_start else _NOWHERE)
            if place >= text_start:
                heads[key] = place


class SuffixIndex:
    """The last `capacity` tokens of one or several texts; all of them without a capacity.

    Positions count all tokens ever taken in; those in [start, end) are held. Memory is proportional to them.
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
        """Take in more tokens of the current text; the cost does not depend on what is held."""
        if self.end + len(token_ids) <= self._capacity:
            self._tokens += token_ids
            self.end += len(token_ids)
            for chains in self._chains:
                chains.extend(self._tokens, self._text_start)
            return
        for token_id in token_ids:
            self._append(token_id)

    def end_text(self) -> None:
        """Begin another text: nothing matches or continues across."""
        self._text_start = self.end + 1
        self._append(SEPARATOR)

    def occurrences(self, suffix: Seq[int]) -> list[Occurrence]:
        """Return the latest places where an end of `suffix` occurred before, of which MAX_MATCH tokens count.

        Every n-gram size gives some, the longest first.
        """
        suffix = suffix[-MAX_MATCH:]
        found: dict[int, Occurrence] = {}
        for chains in reversed(self._chains):
            for rank, position in enumerate(self._positions(chains, suffix)):
                if position not in found and (length := self._match_len(suffix, position)) >= chains.size:
                    found[position] = Occurrence(self, position, length, rank)
        return list(found.values())

    def token_at(self, position: int, continuation: Seq[int]) -> int:
        """Return the token at a position; `continuation` is what follows the end."""
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
        """Note the n-gram that the latest token has completed, if it lies within the text and is all there."""
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
        """Positions after the latest occurrences of the suffix's last n-gram; hashes may collide, so look closer."""
        if len(suffix) < chains.size:
            return
        place = chains.heads.get(hash(tuple(suffix[-chains.size :])), _NOWHERE)
        num_found = 0
        while place >= self.start and num_found < _MAX_OCCURRENCES:
            if place + chains.size < self.end:  # the end of the text itself has no follower yet
                num_found += 1
                yield place + chains.size
            place = chains.previous[place % self._capacity]

    def _match_len(self, suffix: Seq[int], position: int) -> int:
        """Return how many tokens before `position` are the last ones of the suffix."""
        length = 0
        while length < len(suffix) and position - length > self.start:
            if self._tokens[(position - length - 1) % self._capacity] != suffix[-1 - length]:
                break
            length += 1
        return length


def _put(ring: list[int], index: int, value: int) -> None:
    if index == len(ring):
        ring.append(value)
    else:
        ring[index] = value

"""Where the last tokens of a text occurred before, and what followed: a suffix tree that finds its nodes when asked.

The occurrences of a suffix are the leaves under its node, and how often they go on with a token is that child's count.
Chains of equal n-grams, as in DEFLATE (RFC 1951), give the occurrences, so a new token costs a few table entries
instead of a path of nodes, and forgetting the oldest one costs the same.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

MAX_MATCH = 32  # tokens of context that can tell occurrences apart

_SIZES = (2, 4, 8)  # a long suffix is looked up by a long n-gram: it has fewer occurrences to sort out
_MAX_OCCURRENCES = 16  # the latest ones vote
_SEPARATOR = -1  # between two texts; equals no token
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Guess:
    """A continuation, the length of the suffix it followed, and how many of its tokens are expected to be right."""

    token_ids: tuple[int, ...]
    match_len: int
    expected_tokens: float


@dataclass(frozen=True, slots=True)
class _Match:
    """The longest suffix that occurred before, and the positions that followed it, the latest first."""

    length: int
    positions: list[int]


class _Chains:
    """The places of all n-grams of one size, each linked to the one before it; a place is where the n-gram starts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.heads: dict[int, int] = {}  # hash of an n-gram -> its latest place
        self.previous: list[int] = []  # by place modulo capacity


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

    def extend(self, token_ids: Iterable[int]) -> None:
        """Take in more tokens of the current text; the cost does not depend on what is held."""
        for token_id in token_ids:
            self._append(token_id)

    def end_text(self) -> None:
        """What comes next is another text: nothing matches or continues across."""
        self._text_start = self.end + 1
        self._append(_SEPARATOR)

    def guess(self, suffix: Seq[int], max_tokens: int, alpha: float, tau: float) -> Guess | None:
        """The most frequent continuation of the longest known end of `suffix`, of which MAX_MATCH tokens count.

        It has at most `alpha` tokens per matched token, and goes on while a share of at least `tau` of the occurrences
        goes on like it. Of equally frequent tokens the one of the latest occurrence wins.
        """
        match = self._longest_match(suffix[-MAX_MATCH:])
        if match is None:
            return None
        token_ids: list[int] = []
        expected_tokens, positions = 0.0, match.positions
        while positions and len(token_ids) < min(max_tokens, int(alpha * match.length)):
            followers = [self._follower(position, token_ids) for position in positions]
            votes = Counter(token_id for token_id in followers if token_id != _SEPARATOR)
            token_id, num_votes = votes.most_common(1)[0] if votes else (_SEPARATOR, 0)
            if num_votes < max(1.0, tau * len(match.positions)):
                break
            positions = [at + 1 for at, follower in zip(positions, followers, strict=True) if follower == token_id]
            token_ids.append(token_id)
            expected_tokens += num_votes / len(match.positions)
        return Guess(tuple(token_ids), match.length, expected_tokens) if token_ids else None

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
        if place >= max(self._text_start, self.start):
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
        return hash(tuple(self._tokens[at % self._capacity] for at in range(place, min(place + size, self.end))))

    def _longest_match(self, suffix: Seq[int]) -> _Match | None:
        for chains in reversed(self._chains):
            lengths = {at: self._match_len(suffix, at) for at in self._occurrences(chains, suffix)}
            longest = max(lengths.values(), default=0)
            if longest >= chains.size:
                return _Match(longest, [at for at, length in lengths.items() if length == longest])
        return None

    def _occurrences(self, chains: _Chains, suffix: Seq[int]) -> Iterator[int]:
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
        """How many tokens before `position` are the last ones of the suffix."""
        length = 0
        while length < len(suffix) and position - length > self.start:
            if self._tokens[(position - length - 1) % self._capacity] != suffix[-1 - length]:
                break
            length += 1
        return length

    def _follower(self, position: int, drafted_ids: Seq[int]) -> int:
        """The token at a position; past the end the guess goes on with itself, as a period does."""
        if position >= self.end:
            return drafted_ids[position - self.end]
        return self._tokens[position % self._capacity]


def _put(ring: list[int], index: int, value: int) -> None:
    if index == len(ring):
        ring.append(value)
    else:
        ring[index] = value

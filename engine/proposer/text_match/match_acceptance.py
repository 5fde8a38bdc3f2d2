"""The chance that a copied token stands, by the context that its place shares: learned from what was committed.

Agents repeat themselves to the letter, prose hardly at all, and a match of two tokens means more in the one than in the
other. A draft that ends where it is not expected to go on costs no rows that are lost.
"""

from __future__ import annotations

_NUM_KINDS = 5  # matches of 1, 2 to 3, 4 to 7, 8 to 15, and 16 tokens or more
_WINDOW = 200.0  # votes of a kind that count
_TRUST = 8.0  # votes that the prior is worth


class MatchAcceptance:
    """Chances by length of the match, all texts together.

    Before anything is known a match of n tokens has `n / (n + 2)`, between what prose and agents turn out to have.
    A token with a part of the vote stands so much less often, so what is learned is standing per vote.
    """

    def __init__(self) -> None:
        self._voted = [0.0] * (_NUM_KINDS + 1)
        self._stood = [0.0] * (_NUM_KINDS + 1)

    def of(self, match_len: int, share: float) -> float:
        """Return the chance that a token with this share of the vote stands if all before it do."""
        kind = _kind_of(match_len)
        prior = match_len / (match_len + 2)
        return min(1.0, share * (self._stood[kind] + _TRUST * prior) / (self._voted[kind] + _TRUST))

    def observe(self, match_len: int, share: float, *, stood: bool) -> None:
        """Take in what became of a token; old ones fade."""
        kind, fade = _kind_of(match_len), 1.0 - 1.0 / _WINDOW
        self._voted[kind] = fade * self._voted[kind] + share
        self._stood[kind] = fade * self._stood[kind] + stood


def _kind_of(match_len: int) -> int:
    return min(match_len.bit_length(), _NUM_KINDS)

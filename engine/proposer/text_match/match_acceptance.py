"""The chance that a copied token is accepted, by the length of its match, learned from committed tokens.

Agents repeat themselves exactly and prose hardly ever, so a match of two tokens means more in an agent's text. A draft
that ends at a small chance wastes no rows.
"""

from __future__ import annotations

_NUM_KINDS = 5  # matches of 1, 2 to 3, 4 to 7, 8 to 15, and 16 tokens or more
_WINDOW = 200.0  # votes of a kind that count
_TRUST = 8.0  # weight of the prior, in votes


class MatchAcceptance:
    """Chances by length of the match, over all texts.

    The prior of a match of n tokens is `n / (n + 2)`, between the measured chances of prose and agents. The chance of a
    token is proportional to its share of the vote, so acceptance is learned per vote.
    """

    def __init__(self) -> None:
        self._voted = [0.0] * (_NUM_KINDS + 1)
        self._accepted = [0.0] * (_NUM_KINDS + 1)

    def of(self, match_len: int, share: float) -> float:
        """Return the chance that a token with this share of the vote is accepted after all tokens before it."""
        kind = _kind_of(match_len)
        prior = match_len / (match_len + 2)
        return min(1.0, share * (self._accepted[kind] + _TRUST * prior) / (self._voted[kind] + _TRUST))

    def observe(self, match_len: int, share: float, *, is_accepted: bool) -> None:
        """Record one token; old tokens fade."""
        kind, fade = _kind_of(match_len), 1.0 - 1.0 / _WINDOW
        self._voted[kind] = fade * self._voted[kind] + share
        self._accepted[kind] = fade * self._accepted[kind] + is_accepted


def _kind_of(match_len: int) -> int:
    return min(match_len.bit_length(), _NUM_KINDS)

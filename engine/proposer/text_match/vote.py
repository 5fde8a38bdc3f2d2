"""The likeliest continuation of a text, by a vote of the earlier occurrences of its end.

An occurrence with more matching context outweighs one with less. With equal context the later occurrence outweighs the
earlier one, since texts tend to repeat recent tokens. An occurrence that differs from a drafted token loses its vote.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.proposer.text_match.suffix_index import SEPARATOR, Occurrence

_CONTEXT_WEIGHT = 4.0  # factor per matching token
_AGE_WEIGHT = 0.7  # factor per later occurrence


@dataclass(frozen=True, slots=True)
class VotedToken:
    """A token of the continuation, its share of the vote, and the longest matching context of its voters.

    The context includes the tokens before it in the continuation.
    """

    token_id: int
    share: float
    match_len: int


def continuation(occurrences: Seq[Occurrence]) -> Iterator[VotedToken]:
    """Yield the tokens that win the vote, one after the other, until no occurrence has a continuation."""
    voters = [(_CONTEXT_WEIGHT**each.match_len * _AGE_WEIGHT**each.rank, each) for each in occurrences]
    drafted_ids: list[int] = []
    while voters:
        # Each occurrence votes for its next token.
        followers = [place.follower(drafted_ids) for _, place in voters]
        votes: dict[int, float] = {}
        for (weight, _), token_id in zip(voters, followers, strict=True):
            votes[token_id] = votes.get(token_id, 0.0) + weight
        total = sum(votes.values())
        votes.pop(SEPARATOR, None)
        if not votes:
            return
        # Only the voters of the winner vote again.
        winner = max(votes, key=votes.__getitem__)
        voters = [voter for voter, token_id in zip(voters, followers, strict=True) if token_id == winner]
        match_len = max(place.match_len for _, place in voters) + len(drafted_ids)
        yield VotedToken(winner, votes[winner] / total, match_len)
        drafted_ids.append(winner)

"""The likeliest continuation of a text, by the vote of the places where its end occurred before.

A place that shares more context outweighs one that shares less, and of equal ones the later: what a text said last it
says again. Those that a drafted token contradicts have no say in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.proposer.text_match.suffix_index import SEPARATOR, Occurrence

_CONTEXT_WEIGHT = 4.0  # of a place against one that shares a token less
_AGE_WEIGHT = 0.7  # of a place against the next later one


@dataclass(frozen=True, slots=True)
class VotedToken:
    """A token of the continuation, its share of the vote, and how much context its voters share at most.

    The tokens before it in the continuation are context like any other.
    """

    token_id: int
    share: float
    match_len: int


def continuation(occurrences: Seq[Occurrence]) -> Iterator[VotedToken]:
    """Yield the tokens that win the vote, one after the other, until no place goes on."""
    voters = [(_CONTEXT_WEIGHT**each.match_len * _AGE_WEIGHT**each.rank, each) for each in occurrences]
    drafted_ids: list[int] = []
    while voters:
        followers = [place.follower(drafted_ids) for _, place in voters]
        votes: dict[int, float] = {}
        for (weight, _), token_id in zip(voters, followers, strict=True):
            votes[token_id] = votes.get(token_id, 0.0) + weight
        total = sum(votes.values())
        votes.pop(SEPARATOR, None)
        if not votes:
            return
        winner = max(votes, key=votes.__getitem__)
        voters = [voter for voter, token_id in zip(voters, followers, strict=True) if token_id == winner]
        match_len = max(place.match_len for _, place in voters) + len(drafted_ids)
        yield VotedToken(winner, votes[winner] / total, match_len)
        drafted_ids.append(winner)

"""The likeliest outcomes of a pass that is being verified, for a draft to prepare for.

A pass of K drafts ends at one of K + 1 positions: after its first 0, 1, .. K drafts comes a token that is no draft.
Reaching position k takes k drafts that stand, so it grows rarer geometrically (arXiv:2603.03251), and of the tokens the
draft ranks there the r-th is right about as often as r**-1.5 says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

_STANDS = 0.8  # chance that one more draft stands; from 0.7 to 0.9 the best shares hardly differ
_RANK_POWER = -1.5  # coupled drafts of the demo pair at temperature 1: 47, 19, 10, 6, 3% for ranks 1 to 5


@dataclass(frozen=True, slots=True)
class Candidate:
    """The `rank`-th likeliest token (from 0) after the first `num_accepted` drafts, unless it is the draft itself."""

    num_accepted: int
    rank: int


@cache
def fan_out(num_drafts: int, num_per_position: int) -> tuple[Candidate, ...]:
    """The likeliest outcomes of a pass of `num_drafts`, likeliest first, `num_per_position` times its positions.

    After the last draft there is nothing to be left out: the draft's own choice is rank 0 there, and likeliest of all.
    """
    num_candidates = num_per_position * (num_drafts + 1)
    rejected = [Candidate(k, rank) for k in range(num_drafts) for rank in range(num_candidates)]
    bonus = [Candidate(num_drafts, rank) for rank in range(1, num_candidates)]
    likeliest = sorted([*rejected, *bonus], key=lambda each: _weight(each, num_drafts), reverse=True)
    return (Candidate(num_drafts, 0), *likeliest[: num_candidates - 1])


def _weight(candidate: Candidate, num_drafts: int) -> float:
    num_better = candidate.rank if candidate.num_accepted == num_drafts else candidate.rank + 1
    return float(_STANDS**candidate.num_accepted * num_better**_RANK_POWER)

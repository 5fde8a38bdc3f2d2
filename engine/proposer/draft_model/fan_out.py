"""The likeliest outcomes of a pass under verification.

A pass of K drafts ends at one of K + 1 positions: its first 0, 1, .. K drafts are accepted, and a token that is not a
draft follows. Position k needs k accepted drafts, so its chance falls geometrically (arXiv:2603.03251). The chance of
the r-th token in the draft's ranking is proportional to about r**-1.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

FAN_OUT = 3  # outcomes per position
_ACCEPTANCE = 0.8  # chance that one more draft is accepted; the result hardly differs from 0.7 to 0.9
_RANK_POWER = -1.5  # coupled drafts of the demo pair at temperature 1: 47, 19, 10, 6, 3% for ranks 1 to 5


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """The token of rank `rank` (from 0) after the first `num_accepted` drafts; the next draft itself is not ranked."""

    num_accepted: int
    rank: int


@cache
def fan_out(num_drafts: int, num_per_position: int) -> tuple[PassOutcome, ...]:
    """Return the likeliest outcomes of a pass, likeliest first: `num_per_position` per position on average.

    After the last draft the draft model's own choice is rank 0, and it is the likeliest outcome.
    """
    num_outcomes = num_per_position * (num_drafts + 1)
    rejected = [PassOutcome(k, rank) for k in range(num_drafts) for rank in range(num_outcomes)]
    bonus = [PassOutcome(num_drafts, rank) for rank in range(1, num_outcomes)]
    likeliest = sorted([*rejected, *bonus], key=lambda each: _weight(each, num_drafts), reverse=True)
    return (PassOutcome(num_drafts, 0), *likeliest[: num_outcomes - 1])


def _weight(outcome: PassOutcome, num_drafts: int) -> float:
    num_better = outcome.rank if outcome.num_accepted == num_drafts else outcome.rank + 1
    return float(_ACCEPTANCE**outcome.num_accepted * num_better**_RANK_POWER)

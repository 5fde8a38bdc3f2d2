"""The speed of decoding by the number of sequences that decode, so that two drafts are compared under equal load."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads torch, and shells read these sums
    from engine.stats.rates import StepWork


@dataclass(frozen=True, slots=True)
class GoodputStats:
    """Sums over steps that read no prompt and decode `num_sequences` or more, but fewer than twice as many."""

    num_sequences: int
    num_tokens: int = 0  # committed: accepted drafts, and one recovered or bonus token per sequence and pass
    seconds: float = 0.0


class GoodputMeter:
    """Adds up the steps that only decode; prompts would hide the drafts' share."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, float]] = {}

    def observe(self, work: StepWork) -> None:
        """Take in a step."""
        if work.num_prefill_tokens or not work.num_decode_sequences:
            return
        size = 1 << (work.num_decode_sequences.bit_length() - 1)
        num_tokens, seconds = self._sums.get(size, (0, 0.0))
        self._sums[size] = num_tokens + work.num_committed_tokens, seconds + work.seconds

    def snapshot(self) -> tuple[GoodputStats, ...]:
        """Return the sums since the start."""
        return tuple(GoodputStats(size, *sums) for size, sums in sorted(self._sums.items()))


def since(earlier: Seq[GoodputStats], now: Seq[GoodputStats]) -> tuple[GoodputStats, ...] | None:
    """Return what came between two snapshots; None where an engine has started anew between them."""
    before = {each.num_sequences: each for each in earlier}
    if not before.keys() <= {each.num_sequences for each in now}:
        return None
    differences = []
    for each in now:
        past = before.get(each.num_sequences, GoodputStats(each.num_sequences))
        differences.append(
            GoodputStats(each.num_sequences, each.num_tokens - past.num_tokens, each.seconds - past.seconds)
        )
    return None if any(each.num_tokens < 0 or each.seconds < 0 for each in differences) else tuple(differences)


def seconds_of(sums: Seq[GoodputStats]) -> float:
    """Return the seconds of all steps."""
    return sum(each.seconds for each in sums)


def log_ratio(new: Seq[GoodputStats], old: Seq[GoodputStats]) -> float | None:
    """Return the logarithm of new over old tokens per second, under equal load; None where no load is in both.

    Each number of sequences counts by the time that both have of it.
    """
    others = {each.num_sequences: each for each in old if each.num_tokens > 0 and each.seconds > 0}
    total = weights = 0.0
    for each in new:
        other = others.get(each.num_sequences)
        if other is None or each.num_tokens <= 0 or each.seconds <= 0:
            continue
        weight = min(each.seconds, other.seconds)
        total += weight * math.log(each.num_tokens / each.seconds / (other.num_tokens / other.seconds))
        weights += weight
    return total / weights if weights else None

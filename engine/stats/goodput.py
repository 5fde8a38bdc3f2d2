"""The speed of decoding by the number of sequences that decode, so that two drafts are compared under equal load."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads torch, and shells read these sums
    from engine.stats.rates import StepWork


@dataclass(frozen=True, slots=True)
class PassStats:
    """Sums over the target's passes of one number of rows."""

    num_rows: int
    num_passes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GoodputStats:
    """Sums over steps that read no prompt and decode `num_sequences` or more, but fewer than twice as many."""

    num_sequences: int
    num_tokens: int = 0  # committed: accepted drafts, and one recovered or bonus token per sequence and pass
    seconds: float = 0.0
    passes: tuple[PassStats, ...] = ()  # where a processor computes them


class GoodputMeter:
    """Adds up the steps that only decode; prompts would hide the drafts' share.

    Args:
        times_passes: keep the passes by their rows. On a GPU the host only issues a pass, and its time says nothing.
    """

    def __init__(self, *, times_passes: bool) -> None:
        self._times_passes = times_passes
        self._sums: dict[int, tuple[int, float]] = {}
        self._passes: dict[int, dict[int, tuple[int, float]]] = defaultdict(dict)

    def observe(self, work: StepWork) -> None:
        """Take in a step."""
        if work.num_prefill_tokens or not work.num_decode_sequences:
            return
        size = 1 << (work.num_decode_sequences.bit_length() - 1)
        num_tokens, seconds = self._sums.get(size, (0, 0.0))
        self._sums[size] = num_tokens + work.num_committed_tokens, seconds + work.seconds
        if self._times_passes:
            num_rows = work.num_decode_sequences + work.num_drafts
            num_passes, pass_s = self._passes[size].get(num_rows, (0, 0.0))
            self._passes[size][num_rows] = num_passes + 1, pass_s + work.pass_s

    def snapshot(self) -> tuple[GoodputStats, ...]:
        """Return the sums since the start."""
        return tuple(
            GoodputStats(
                size, *sums, tuple(PassStats(rows, *each) for rows, each in sorted(self._passes[size].items()))
            )
            for size, sums in sorted(self._sums.items())
        )


def since(earlier: Seq[GoodputStats], now: Seq[GoodputStats]) -> tuple[GoodputStats, ...] | None:
    """Return what came between two snapshots; None where an engine has started anew between them."""
    before = {each.num_sequences: each for each in earlier}
    if not before.keys() <= {each.num_sequences for each in now}:
        return None
    differences = []
    for each in now:
        past = before.get(each.num_sequences, GoodputStats(each.num_sequences))
        passes = _passes_since(past.passes, each.passes)
        differences.append(
            GoodputStats(each.num_sequences, each.num_tokens - past.num_tokens, each.seconds - past.seconds, passes)
        )
    return None if any(each.num_tokens < 0 or each.seconds < 0 for each in differences) else tuple(differences)


def _passes_since(earlier: Seq[PassStats], now: Seq[PassStats]) -> tuple[PassStats, ...]:
    before = {each.num_rows: each for each in earlier}
    differences = []
    for each in now:
        past = before.get(each.num_rows, PassStats(each.num_rows))
        num_passes = each.num_passes - past.num_passes
        if num_passes:
            differences.append(PassStats(each.num_rows, num_passes, each.seconds - past.seconds))
    return tuple(differences)


def seconds_of(sums: Seq[GoodputStats]) -> float:
    """Return the seconds of all steps."""
    return sum(each.seconds for each in sums)


def log_ratio(new: Seq[GoodputStats], old: Seq[GoodputStats]) -> float | None:
    """Return the logarithm of new over old tokens per second, under equal load; None where no load is in both.

    Each number of sequences counts by the time that both have of it. A machine that was slower while one of the drafts
    ran is no fault of that draft: the target's passes over as many rows count as long with both, the mean of them.
    """
    others = {each.num_sequences: each for each in old if each.num_tokens > 0 and each.seconds > 0}
    total = weights = 0.0
    for each in new:
        other = others.get(each.num_sequences)
        if other is None or each.num_tokens <= 0 or each.seconds <= 0:
            continue
        weight = min(each.seconds, other.seconds)
        excess_s = _excess_s(each.passes, other.passes)
        new_speed = each.num_tokens / (each.seconds - excess_s)
        total += weight * math.log(new_speed / (other.num_tokens / (other.seconds + excess_s)))
        weights += weight
    return total / weights if weights else None


def _excess_s(new: Seq[PassStats], old: Seq[PassStats]) -> float:
    """Return the seconds that the new passes took above the mean of both, over as many rows: the old ones below it."""
    others = {each.num_rows: each for each in old}
    excess_s = 0.0
    for each in new:
        if (other := others.get(each.num_rows)) is not None:
            mean_s = (each.seconds + other.seconds) / (each.num_passes + other.num_passes)
            excess_s += each.seconds - each.num_passes * mean_s
    return excess_s

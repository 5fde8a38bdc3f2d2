"""Decoding speed by the number of decoding sequences, to compare two drafts under equal load."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch, which the shells that read these sums do not need
    from engine.accounting.record import PassRecord


@dataclass(frozen=True, slots=True)
class PassStats:
    """Sums over the target's passes with one number of rows."""

    num_rows: int
    num_passes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GoodputStats:
    """Sums over steps without prefill that decode at least `num_sequences` and fewer than twice as many."""

    num_sequences: int
    num_tokens: int = 0  # committed tokens: accepted drafts, and a recovered or bonus token per sequence and pass
    seconds: float = 0.0
    passes: tuple[PassStats, ...] = ()  # on a CPU only


class GoodputMeter:
    """Sums the steps without prefill, since prefill time would hide the effect of drafts.

    Args:
        times_passes: time the passes by number of rows. False on a GPU, where the host only issues a pass.
    """

    def __init__(self, *, times_passes: bool) -> None:
        self._times_passes = times_passes
        self._sums: dict[int, tuple[int, float]] = {}
        self._passes: dict[int, dict[int, tuple[int, float]]] = defaultdict(dict)

    def on_pass(self, record: PassRecord) -> None:
        """Add a step."""
        if record.num_prefill_tokens or not record.num_decode_sequences:
            return
        size = 1 << (record.num_decode_sequences.bit_length() - 1)
        num_tokens, seconds = self._sums.get(size, (0, 0.0))
        self._sums[size] = num_tokens + record.num_committed_tokens, seconds + record.times.total_s
        if self._times_passes:
            num_rows = record.num_decode_sequences + record.num_drafts
            num_passes, pass_s = self._passes[size].get(num_rows, (0, 0.0))
            self._passes[size][num_rows] = num_passes + 1, pass_s + record.times.forward_s

    def snapshot(self) -> tuple[GoodputStats, ...]:
        """Return the sums since the start."""
        return tuple(
            GoodputStats(
                size, *sums, tuple(PassStats(rows, *each) for rows, each in sorted(self._passes[size].items()))
            )
            for size, sums in sorted(self._sums.items())
        )


def since(earlier: Seq[GoodputStats], now: Seq[GoodputStats]) -> tuple[GoodputStats, ...] | None:
    """Return the difference of two snapshots; None if the engine restarted between them."""
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
    """Return the logarithm of new over old tokens per second under equal load; None without a common load.

    Each number of sequences is weighted by the time that both spent at it. Passes over the same number of rows count
    with their mean time over both, so a machine that was slower during one draft does not bias the comparison.
    """
    others = {each.num_sequences: each for each in old if each.num_tokens > 0 and each.seconds > 0}
    total = weights = 0.0
    # Only loads that occur in both are compared.
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
    """Return the new passes' seconds above the mean of both per number of rows. The old ones are as far below it."""
    others = {each.num_rows: each for each in old}
    excess_s = 0.0
    for each in new:
        if (other := others.get(each.num_rows)) is not None:
            mean_s = (each.seconds + other.seconds) / (each.num_passes + other.num_passes)
            excess_s += each.seconds - each.num_passes * mean_s
    return excess_s

"""The rows of the table: medians over the rounds, percentiles over all their tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.contenders.contender import Run
from bench.peers.reference import Reference
from bench.peers.rounds import Measurement, Outcome
from bench.peers.system import Mode

TOGETHER_S = 1e-3


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Row:
    """One system in one mode at one number of streams.

    `first_token` is from the start of the run, `between` from one arrival of tokens to the next of the same stream;
    arrivals within `TOGETHER_S` are one, since some servers send the tokens of one pass one by one.
    `own_share` is of tokens equal to the system's own without the draft; `reference_share` to the float32 reference.
    """

    system: str
    mode: Mode
    num_streams: int
    tokens_per_second: float
    lowest: float
    highest: float
    first_token: Percentiles
    between: Percentiles
    own_share: float | None
    reference_share: float
    peak_mb: float


def rows_of(outcome: Outcome, reference: Reference) -> list[Row]:
    """Stream first, then the systems in the order of their first runs."""
    keys = dict.fromkeys((m.num_streams, m.system, m.mode) for m in outcome.measurements)
    return [_row(outcome, reference, *key) for key in sorted(keys, key=lambda key: key[0])]


def _row(outcome: Outcome, reference: Reference, num_streams: int, system: str, mode: Mode) -> Row:
    runs = _runs(outcome.measurements, num_streams, system, mode)
    plain = _runs(outcome.measurements, num_streams, system, Mode.PLAIN)
    speeds = [run.tokens_per_second for run in runs]
    own = shared(runs[0].outputs, plain[0].outputs) if plain and mode is Mode.DRAFT else None
    return Row(
        system,
        mode,
        num_streams,
        statistics.median(speeds),
        min(speeds),
        max(speeds),
        _percentiles([times[0] for run in runs for times in _arrivals(run)]),
        _percentiles([gap for run in runs for times in _arrivals(run) for gap in gaps(times)]),
        own,
        shared(runs[0].outputs, reference.outputs[:num_streams]),
        sum(outcome.peaks.get((system, mode), {}).values()) / 1e6,
    )


def _runs(measurements: Seq[Measurement], num_streams: int, system: str, mode: Mode) -> list[Run]:
    return [m.run for m in measurements if (m.num_streams, m.system, m.mode) == (num_streams, system, mode)]


def _arrivals(run: Run) -> list[list[float]]:
    assert run.arrivals is not None, "contenders of this benchmark stream"
    return run.arrivals


def gaps(arrivals: Seq[float]) -> list[float]:
    """Seconds between arrivals that are not of one pass."""
    return [gap for before, after in pairwise(arrivals) if (gap := after - before) > TOGETHER_S]


def shared(outputs: Seq[Seq[int]], others: Seq[Seq[int]]) -> float:
    """Return the share of positions at which both have the same token."""
    same = [a == b for ours, theirs in zip(outputs, others, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return sum(same) / len(same)


def _percentiles(seconds: Seq[float]) -> Percentiles:
    p50, p99 = 1e3 * np.percentile(seconds or [0.0], [50, 99])
    return Percentiles(float(p50), float(p99))

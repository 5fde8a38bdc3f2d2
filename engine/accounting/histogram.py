"""A histogram of times in fixed buckets, as in Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """Counts per bucket, not cumulative. The last count is for values above all bounds."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """Cumulative counts: `(le, count)` of every bucket."""
        sums, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            sums.append((bound, float(so_far)))
        return sums


class Histogram:
    """Counts `HistogramStats`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value. A value equal to a bound belongs to its bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramStats:
        """Return the counts so far."""
        return HistogramStats(self._bounds, tuple(self._counts), self._total)

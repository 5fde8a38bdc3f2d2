"""A prefill replica's Prometheus metrics; the pairs' use of its blocks is in `actors.pair.pair_metrics`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from actors.kv_transfer.direct_blocks import DirectStats
from engine.accounting.engine_stats import EngineStats


class PrefillMetrics(Collector):
    """All `outrider_prefill_replica_*` metrics."""

    def __init__(self) -> None:
        self._stats: EngineStats | None = None
        self._direct = DirectStats()

    def update(self, stats: EngineStats, direct: DirectStats) -> None:
        """Take in the present numbers of the engine and of the blocks kept for pairs."""
        self._stats, self._direct = stats, direct

    def text(self) -> str:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self).decode()

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Yield every metric."""
        stats = self._stats
        if stats is None:
            return
        computed = stats.num_prefix_queried_tokens - stats.num_prefix_hit_tokens - stats.remote.num_tokens
        yield _counter("computed_tokens", "Prompt tokens computed.", computed)
        yield _counter("cached_tokens", "Prompt tokens found in its prefix cache.", stats.num_prefix_hit_tokens)
        yield _counter(
            "copied_tokens", "Prompt tokens whose blocks came from another replica.", stats.remote.num_tokens
        )
        yield _gauge("queued_tokens", "Prompt tokens to be computed.", stats.num_queued_prefill_tokens)
        yield _gauge("tokens_per_second", "Measured speed, 0 before that.", stats.prefill_tokens_per_s)
        yield _counter("direct_chunks", "Chunks left for pairs to read by NIXL.", self._direct.num_chunks)
        yield _gauge("direct_bytes", "Size of the blocks kept for pairs to read.", self._direct.kept_bytes)
        yield _gauge("orders_running", "Orders that hold blocks.", stats.num_running)
        yield _gauge("orders_waiting", "Orders in the queue.", stats.num_waiting)
        yield _gauge("kv_cache_usage", "Share of the KV blocks that orders hold, 0 to 1.", stats.kv_usage)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"outrider_prefill_replica_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"outrider_prefill_replica_{name}", text, value=value)

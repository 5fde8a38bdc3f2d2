"""The Serve deployment that prefills prompts for the pairs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.process import configure_logging
from actors.process.actor_thread import quick_imports
from actors.settings import PrefillSettings
from actors.target.index_reporter import ReportSink
from engine.accounting.engine_stats import EngineStats

if TYPE_CHECKING:  # Serve's builder imports this class, and must not load torch for it
    from actors.kv_transport import PrefillReply
    from engine.remote_prefill.kv_transfer import FetchOrder, KVLayout
    from protos.block_keys import PrefixHolder


class PrefillMetrics(Collector):
    """All `outrider_prefill_replica_*` metrics."""

    def __init__(self, stats: EngineStats, direct: tuple[int, int]) -> None:
        """`direct` is the chunks and bytes of blocks kept for pairs."""
        self._stats, self._direct = stats, direct

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Yield every metric."""
        stats, (num_chunks, kept_bytes) = self._stats, self._direct
        computed = stats.num_prefix_queried_tokens - stats.num_prefix_hit_tokens - stats.remote.num_tokens
        yield _counter("computed_tokens", "Prompt tokens computed.", computed)
        yield _counter("cached_tokens", "Prompt tokens found in its prefix cache.", stats.num_prefix_hit_tokens)
        yield _counter(
            "copied_tokens", "Prompt tokens whose blocks came from another replica.", stats.remote.num_tokens
        )
        yield _gauge("queued_tokens", "Prompt tokens to be computed.", stats.num_queued_prefill_tokens)
        yield _gauge("tokens_per_second", "Measured speed, 0 before that.", stats.prefill_tokens_per_s)
        yield _counter("direct_chunks", "Chunks left for pairs to read by NIXL.", num_chunks)
        yield _gauge("direct_bytes", "Size of the blocks kept for pairs to read.", kept_bytes)
        yield _gauge("orders_running", "Orders that hold blocks.", stats.num_running)
        yield _gauge("orders_waiting", "Orders in the queue.", stats.num_waiting)
        yield _gauge("kv_cache_usage", "Share of the KV blocks that orders hold, 0 to 1.", stats.kv_usage)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"outrider_prefill_replica_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"outrider_prefill_replica_{name}", text, value=value)


class Prefill:
    """One replica of the Serve deployment `Prefill`: the target model, prefill only, with its own prefix cache.

    Its death costs the pairs time and never a token: they prefill the missing blocks themselves.

    Args:
        settings: the engine's.
        open_index: returns the index of an application's prefill replicas; pairs choose from it.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: PrefillSettings, open_index: Callable[[str], ReportSink]
    ) -> None:
        with quick_imports():
            from actors.prefill_engine import PrefillEngine

        configure_logging(is_replica=True)
        replica = serve.get_replica_context()
        peers: DeploymentHandle[Any] = serve.get_deployment_handle(replica.deployment, replica.app_name)
        self._engine = PrefillEngine(settings, replica.replica_id.unique_id, open_index(replica.app_name), peers)
        await self._engine.wait_ready()

    async def prefill(
        self, order: FetchOrder, layout: KVLayout, use_direct: bool, holder: PrefixHolder | None = None
    ) -> AsyncGenerator[PrefillReply, None]:
        """Prefill a prompt, and reply with the stream of `actors.kv_transport`.

        Closing the generator stops the computation and frees its blocks within a step.

        Args:
            order: the blocks that the pair lacks.
            layout: the pair's; a layout that differs from this replica's is refused.
            use_direct: send blocks as `DirectBlocks` if this replica can.
            holder: the replica that has the order's first blocks; the router adds it.
        """
        async with aclosing(self._engine.prefill(order, layout, use_direct, holder)) as replies:
            async for reply in replies:
                yield reply

    async def copy(
        self, order: FetchOrder, layout: KVLayout, use_direct: bool, holder_id: str
    ) -> AsyncGenerator[PrefillReply, None]:
        """Send another replica the order's blocks that are cached here, in the same kind of stream.

        `holder_id` is this replica's id; the router has used it to find this replica.
        """
        async with aclosing(self._engine.copy(order, layout, use_direct)) as replies:
            async for reply in replies:
                yield reply

    async def metrics_text(self) -> str:
        """Return this replica's metrics in Prometheus text format, as they are now."""
        return generate_latest(PrefillMetrics(self._engine.stats, self._engine.direct)).decode()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the waiting work. Serve calls it if the number of replicas scales with it."""
        return self._engine.work

    async def check_health(self) -> None:
        """Raise if this replica should be replaced; Serve calls it."""
        self._engine.check()

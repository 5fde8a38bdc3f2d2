"""The shell of one draft-target pair: admits requests, passes their tokens on, and watches the actors.

Its event loop never computes and knows no model: all numeric work is done by the actors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from prometheus_client.registry import Collector
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Gauge

from actors.pair.auto_tune import drift_response
from actors.pair.pair_actors import PairActors
from actors.pair.pair_draft import PairDraft, PairDrafts
from actors.pair.pair_metrics import PairMetrics
from actors.pair.pair_shell import PairShell, Watchdog, check_running
from actors.pair.target_client import TargetClient
from actors.process import configure_logging
from actors.process.frames import private_folder
from actors.settings import PairDevices, PairSettings
from actors.shell_messages import Pong
from actors.target.index_reporter import IndexReporter, ReportSink
from engine.accounting.goodput import GoodputStats
from protos.linux import wait_for_cores
from protos.served_model import DraftReport

logger = logging.getLogger(__name__)


def export_to_ray(collector: Collector, gauges: dict[str, Gauge]) -> None:
    """Copy a collector's samples into Ray gauges with their labels and names; counters use the family's name.

    `gauges` keeps the gauges by name; Ray exports them at its own interval.
    """
    for family in collector.collect():
        for sample in family.samples:
            name = family.name if family.type == "counter" else sample.name  # each `_bucket` gets its own gauge
            if name not in gauges:
                gauges[name] = Gauge(name, description=family.documentation, tag_keys=tuple(sample.labels))
            gauges[name].set(sample.value, tags=dict(sample.labels))


class Pair(PairShell):
    """One replica of the Serve deployment `Pair`.

    Args:
        settings: the pair's and its actors'.
        pin_devices: assigns the devices that Ray gave this replica to target and draft.
        open_index: returns the router's index of an application.
        prefill: the deployment that prefills long prompts for the target, if any.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it; the replica is not ready before
        self,
        settings: PairSettings,
        pin_devices: Callable[[tuple[str, ...]], PairDevices],
        open_index: Callable[[str], ReportSink],
        prefill: DeploymentHandle[Any] | None = None,
    ) -> None:
        configure_logging(is_replica=True)
        wait_for_cores()
        replica = serve.get_replica_context()
        replica_id = replica.replica_id.unique_id
        super().__init__(settings, PairMetrics(replica_id))
        self._gauges: dict[str, Gauge] = {}
        self._actors = PairActors(settings, private_folder(), pin_devices(_assigned_gpus()), prefill)
        await self._actors.start()
        self._reporter = IndexReporter(replica_id, open_index(replica.app_name))
        self._client = TargetClient(self._actors.target_socket, self._reporter.take)
        reporting = self._reporter.run(self._client.ask_snapshot, lambda: self._client.num_requests)
        self._reporting = asyncio.create_task(reporting, name="index-reporter")
        self._watchdog = Watchdog(self._client, self._actors.restart_target, self._on_pong, self._actors.restart_draft)
        self._watching = asyncio.create_task(self._watchdog.run(), name="watchdog")
        await self._client.wait_connected()
        self._drafts = await self._exchangeable_drafts(replica_id)
        if self._drafts is not None and settings.auto_tune is not None:
            self._drift_alarms.on_alarm = drift_response(settings.auto_tune, self._drafts)

    async def _exchangeable_drafts(self, replica_id: str) -> PairDrafts | None:
        drafts = await self._head_draft(replica_id)
        for method, process in self._actors.drafts.items():
            digest = await process.digest()
            report = DraftReport(replica_id, process.path, digest, time.time(), is_deployed=True, method=method)
            drafts.append(PairDraft(process, report, self._goodput))
        return PairDrafts(drafts) if drafts else None

    async def _goodput(self) -> tuple[GoodputStats, ...]:
        return (await self._client.ping()).engine.goodput

    async def kill_draft(self) -> bool:
        for process in self._actors.drafts.values():
            process.restart()
        return bool(self._actors.drafts)

    async def check_health(self) -> None:
        """Raise if this replica should be replaced; Serve calls it."""
        self._watchdog.check()
        check_running((self._reporting, self._watching, self._client.task))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the waiting work. Serve calls it if the number of pairs scales with it."""
        return self._reporter.work

    def __del__(self) -> None:
        """Kill the actors. Serve calls it after the last request has ended, or its deadline has passed."""
        if hasattr(self, "_actors"):
            self._actors.close()

    def _on_pong(self, pong: Pong) -> None:
        super()._on_pong(pong)
        export_to_ray(self._metrics, self._gauges)


def _assigned_gpus() -> tuple[str, ...]:
    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))

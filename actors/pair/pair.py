"""The shell of one draft-target pair: lets requests in, carries their tokens out, and watches its actors.

Its event loop never computes and knows no model: everything numeric happens in the actors behind the socket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.pair.admission import Admission
from actors.pair.index_reporter import IndexReporter, ReportSink
from actors.pair.pair_actors import PairActors
from actors.pair.pair_metrics import PairMetrics
from actors.pair.ray_metrics import RayMetrics
from actors.pair.target_client import TargetClient
from actors.pair.watchdog import Watchdog
from actors.process.process_logging import configure_logging
from actors.process.socket_folder import private_folder
from actors.settings import PairDevices, PairSettings
from actors.shell_messages import Pong
from protos.messages import GenerateRequest, ModelCard, TokenChunk

logger = logging.getLogger(__name__)

_SIGN_OF_LIFE_S = 5.0


class Pair:
    """One replica of the Serve deployment `Pair`.

    Args:
        settings: of the pair and its actors.
        pin_devices: chooses, among the device indices Ray gave this replica, those of target and draft.
        open_index: returns the router's index of an application.
        prefill: the deployment that reads long prompts for the target, if any.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it; the replica is not ready before
        self,
        settings: PairSettings,
        pin_devices: Callable[[tuple[int, ...]], PairDevices],
        open_index: Callable[[str], ReportSink],
        prefill: DeploymentHandle[Any] | None = None,
    ) -> None:
        configure_logging()
        self._admission = Admission(settings.max_requests)
        self._metrics = PairMetrics()
        self._ray_metrics = RayMetrics()
        self._actors = PairActors(settings, private_folder(), pin_devices(_assigned_gpus()), prefill)
        await self._actors.start()
        replica = serve.get_replica_context()
        self._reporter = IndexReporter(replica.replica_id.unique_id, open_index(replica.app_name))
        self._client = TargetClient(self._actors.target_socket, self._reporter)
        self._reporting = asyncio.create_task(self._reporter.run(self._client), name="index-reporter")
        self._watchdog = Watchdog(
            self._client, settings, self._actors.restart_target, self._on_pong, self._actors.restart_draft
        )
        self._watching = asyncio.create_task(self._watchdog.run(), name="watchdog")
        self._ping_timeout_s = settings.pong_timeout_s
        await self._client.wait_connected(settings.pong_timeout_s)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[TokenChunk], None]:
        """Yield the request's chunks, all that have queued up at a time; the last one carries the finish reason.

        An empty list is a sign of life: the shell is there, and judges its target itself. Closing the generator aborts
        the request.

        Raises:
            OverloadedError: refused, the pair is full.
            ModelChangedError: refused, the request was made for another model.
            UnavailableError: the target is away, or died meanwhile; chunks already yielded stand.
        """
        arrived_s = time.monotonic()
        self._admission.enter()
        is_accepted = False
        try:
            stream = self._client.add(request)
            is_accepted = True
            is_finished = False
            while not is_finished:
                chunks = await stream.next(_SIGN_OF_LIFE_S)
                is_finished = bool(chunks) and chunks[-1].finish_reason is not None
                yield chunks
        finally:
            self._admission.leave(time.monotonic() - arrived_s)
            if is_accepted:
                self._client.drop(request.request_id)

    async def describe(self) -> ModelCard:
        """Return the card of the model. Raises UnavailableError while the target is away."""
        return self._client.require_card()

    async def metrics_text(self) -> str:
        """Return this replica's metrics in Prometheus text format, as they are now."""
        if self._client.is_connected:
            self._on_pong(await self._client.ping(self._ping_timeout_s))
        return self._metrics.text()

    async def check_health(self) -> None:
        """Raise if this replica should be replaced; called by Serve."""
        self._watchdog.check()

    def __del__(self) -> None:
        """Kill the actors; called by Serve once the last request has left, or the time for that is up."""
        if hasattr(self, "_actors"):
            self._actors.close()

    def _on_pong(self, pong: Pong) -> None:
        self._metrics.update(pong, self._admission.num_refused)
        self._ray_metrics.export(self._metrics)


def _assigned_gpus() -> tuple[int, ...]:
    return tuple(int(index) for index in ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))

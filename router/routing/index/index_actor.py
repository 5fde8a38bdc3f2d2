"""The one process that knows the blocks and the load of every pair: select and reserve, for all ingress replicas."""

from __future__ import annotations

import asyncio
import logging
import time

import ray

from protos.linux import wait_for_cores
from protos.worker_report import WorkerReport
from router.config import RouterConfig
from router.routing.index.index_messages import RouteQuery, RouteReply
from router.routing.index.index_state import IndexState

logger = logging.getLogger(__name__)

_SWEEP_S = 1.0
_LEAVE_AFTER_S = 30.0  # without a report: the application has ended


class IndexActor:
    """An `IndexState` as a Ray actor. No method awaits anything, so calls are atomic and choices never interleave.

    Ray restarts it empty after a crash. The pairs' next reports, within a second, then show a gap, so it requests a
    snapshot from each pair. Ingress replicas and pairs come and go, so no process owns it; it exits once no pair has
    reported for half a minute.
    """

    def __init__(self, config: RouterConfig) -> None:
        wait_for_cores()
        self._state = IndexState(config)
        self._last_report_s = time.monotonic()
        self._sweeper: asyncio.Task[None] | None = None

    async def report(self, report: WorkerReport) -> bool:
        """Apply a worker's report; return True to request a snapshot."""
        self._last_report_s = time.monotonic()
        self._start_sweeping()
        return self._state.report(report, self._last_report_s)

    async def select(self, query: RouteQuery) -> RouteReply:
        """Choose a worker for a request and reserve it."""
        self._start_sweeping()
        return self._state.select(query, time.monotonic())

    async def withdraw(self, worker_id: str, request_id: str) -> None:
        """End the reservation of a request that the worker did not take."""
        self._state.withdraw(worker_id, request_id)

    async def forget(self, worker_id: str) -> None:
        """Drop a worker that has left."""
        self._state.forget(worker_id)

    def _start_sweeping(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="sweeper")

    async def _sweep(self) -> None:
        while time.monotonic() - self._last_report_s < _LEAVE_AFTER_S:
            await asyncio.sleep(_SWEEP_S)
            for worker_id in self._state.forget_silent(time.monotonic()):
                logger.warning("pair %s has not reported for a while; its blocks are forgotten", worker_id)
        logger.info("no pair has reported for %.0f s; the index exits", _LEAVE_AFTER_S)
        ray.kill(ray.get_runtime_context().current_actor)

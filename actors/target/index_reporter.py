"""Reports the target's cache and load to the router's index, and starts over when either was away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from actors.shell_messages import Snapshot, Status, TargetReady
from engine.accounting.engine_stats import EngineStats
from protos.block_keys import CacheDelta, WorkerLoad, WorkerReport
from protos.errors import UnavailableError

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.2  # between two reports of a busy worker; the router predicts what happens in between
_HEARTBEAT_S = 1.0


class ReportSink(Protocol):
    """The destination of reports: `router.routing.index.IndexClient`, or a fake."""

    async def report(self, report: WorkerReport) -> bool:
        """Send a report.

        Returns:
            True if the index asks for a snapshot.

        Raises:
            UnavailableError: the reply did not come in time.
        """


# The events of a target, in this order after each greeting; None for the loss of the target and its cache. After
# a lost connection the same target may greet again.
TargetEvent = TargetReady | Status | Snapshot | None


class IndexReporter:
    """Collects the messages of a `TargetClient` and sends one report at a time. No caller waits for it.

    It requests a snapshot when the target greets, and whenever the index missed a report or was restarted. Statuses
    that arrive before the snapshot are part of it.
    """

    def __init__(self, worker_id: str, sink: ReportSink, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker_id = worker_id
        self._sink = sink
        self._clock = clock
        self._epoch = 0
        self._sequence = 0
        self._load = self._make_load(0.0, None)
        self._deltas: list[CacheDelta] = []
        self._snapshot: bytes | None = None
        self._is_serving = False
        self._is_awaiting_snapshot = False
        self._wants_snapshot = False
        self._has_failed = False
        self._news = asyncio.Event()
        self._is_urgent = asyncio.Event()

    def take(self, event: TargetEvent) -> None:
        """Take in an event of the target."""
        match event:
            case Status():
                self._on_status(event)
            case Snapshot():
                self._on_snapshot(event)
            case TargetReady():
                self.on_ready()
            case None:
                self._on_lost()

    def on_ready(self) -> None:
        """Start an epoch with a target that has greeted. Its cache is unknown until its snapshot arrives."""
        self._epoch, self._sequence = self._epoch + 1, 0
        self._is_serving = True
        self._load = self._make_load(self._clock(), None)
        self._start_over()
        self._hurry()

    def _on_status(self, status: Status) -> None:
        self._load = self._make_load(status.measured_at_s, status.engine)
        if status.cache and not self._is_awaiting_snapshot:
            self._deltas.append(status.cache)
        self._news.set()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._deltas = []
        self._snapshot = snapshot.keys
        self._is_awaiting_snapshot = False
        self._hurry()

    def _on_lost(self) -> None:
        """Report at once that the cache is gone and the pair does not serve."""
        self._is_serving = False
        self._is_awaiting_snapshot = self._wants_snapshot = False
        self._snapshot = None
        self._deltas = [CacheDelta(is_cleared=True)]
        self._load = self._make_load(self._clock(), None)
        self._hurry()

    @property
    def work(self) -> dict[str, float]:
        """The target's work, named as in `cluster.work_policy`: seconds of queued prompts and per decoded token."""
        load = self._load
        queued_s = load.queued_prefill_tokens / load.prefill_tokens_per_s if load.prefill_tokens_per_s else 0.0
        is_decoding = load.running_decode_tokens > 0 and load.decode_tokens_per_s > 0
        return {"queued_prefill_s": queued_s, "token_s": 1 / load.decode_tokens_per_s if is_decoding else 0.0}

    async def run(self, ask_snapshot: Callable[[], None], num_requests: Callable[[], int]) -> None:
        """Report until cancelled: on news, at intervals of at least 0.2 s, and once a second without news.

        Args:
            ask_snapshot: makes the target send a `Snapshot`.
            num_requests: returns the requests that the target has.
        """
        while True:
            if self._wants_snapshot:
                self._wants_snapshot = False
                ask_snapshot()
            await _wait(self._news, _HEARTBEAT_S)
            self._news.clear()
            self._is_urgent.clear()
            await self._report(is_quiet=num_requests() == 0)
            await _wait(self._is_urgent, _INTERVAL_S)

    def _start_over(self) -> None:
        self._deltas = []
        self._snapshot = None
        self._is_awaiting_snapshot = self._wants_snapshot = True
        self._news.set()

    def _hurry(self) -> None:
        """Report without the usual interval, because a whole cache has come or gone."""
        self._news.set()
        self._is_urgent.set()

    async def _report(self, *, is_quiet: bool) -> None:
        report = self._next_report(is_quiet)
        try:
            is_outdated = await self._sink.report(report)
        except UnavailableError as error:
            if not self._has_failed:
                logger.warning("the router's index does not respond; it gets a whole snapshot once it does: %s", error)
            self._has_failed = True
            return
        self._has_failed = False
        if is_outdated and self._is_serving and not self._is_awaiting_snapshot and self._snapshot is None:
            logger.info("the router's index requests all blocks of this pair")
            self._start_over()

    def _next_report(self, is_quiet: bool) -> WorkerReport:
        """Take the next report.

        An idle target sends no status, so its load counts as fresh.
        """
        load = self._load
        is_idle = is_quiet and load.num_waiting_requests + load.num_running_requests == 0
        report = WorkerReport(
            load=load,
            load_age_s=0.0 if is_idle else max(self._clock() - load.measured_at_s, 0.0),
            is_serving=self._is_serving,
            sequence=self._sequence,
            deltas=tuple(self._deltas),
            snapshot=self._snapshot,
        )
        self._sequence += 1
        self._deltas = []
        self._snapshot = None
        return report

    def _make_load(self, measured_at_s: float, stats: EngineStats | None) -> WorkerLoad:
        """Return the load in the router's terms; all zero without stats."""
        if stats is None:
            return WorkerLoad(self._worker_id, self._epoch, measured_at_s, 0, 0, 0, 0)
        return WorkerLoad(
            worker_id=self._worker_id,
            epoch=self._epoch,
            measured_at_s=measured_at_s,
            num_waiting_requests=stats.num_waiting,
            num_running_requests=stats.num_running,
            queued_prefill_tokens=stats.num_queued_prefill_tokens,
            running_decode_tokens=stats.num_running_decode_tokens,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_slowdown=stats.decode_slowdown,
            decode_tokens_per_s=stats.decode_tokens_per_s,
        )


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, but no longer than `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()

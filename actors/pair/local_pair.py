"""A pair in this process, without Ray: the engine in a thread, reached through the same socket as in a cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Sequence
from functools import partial

from actors.pair.pair_draft import PairDrafts
from actors.pair.pair_metrics import PairMetrics
from actors.pair.pair_shell import PairShell
from actors.pair.target_client import TargetClient
from actors.pair.watchdog import Watchdog
from actors.process.actor_thread import ActorThread, quick_imports
from actors.process.frames import private_folder
from actors.settings import PairSettings
from actors.shell_messages import TARGET_SOCKET, Snapshot, Status
from engine.model.checkpoint.weight_files import begin_digests
from protos.served_draft import DraftOrder, DraftReport

logger = logging.getLogger(__name__)


class LocalPair(PairShell):
    """A `router.backend.backend.Backend` of one pair; `start` before the first request.

    Nothing restarts a target here. Where a pair in a cluster would restart it, the process ends with status 1.
    """

    def __init__(self, settings: PairSettings) -> None:
        assert settings.draft_share is None, "a draft model runs in the target's process"
        super().__init__(settings, PairMetrics())
        self._folder = private_folder()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the models, and return when the target responds.

        Raises:
            ServingError: it could not start.
        """
        # Imported here: it loads torch, whose threads depend on the environment at the first import.
        begin_digests(self._settings.engine.model.path)
        with quick_imports():
            from actors.target.target_process import serve_target

        thread = ActorThread("Target", partial(serve_target, self._settings, self._folder, None))
        await asyncio.to_thread(thread.wait_ready, self._settings.start_timeout_s)
        self._client = TargetClient(self._folder / TARGET_SOCKET, _NoIndex())
        await self._client.wait_connected(self._settings.pong_timeout_s)
        if drafts := await self._head_draft("0"):
            self._drafts = PairDrafts(drafts)
        watchdog = Watchdog(self._client, self._settings, _end_process, self._on_pong)
        self._watching = asyncio.create_task(watchdog.run(), name="watchdog")

    async def kill_drafts(self) -> int:
        """Return 0: no draft has a process of its own."""
        return 0

    async def order_drafts(self, order: DraftOrder) -> Sequence[DraftReport]:
        """Carry out an order about the head. Raises as `PairShell.order_draft`."""
        return await self.order_draft(order)

    async def metrics_texts(self) -> Sequence[str]:
        """Return this pair's metrics in Prometheus text format."""
        return [await self.metrics_text()]

    async def close(self) -> None:
        """Disconnect from the target, which then stops computing. A second call does nothing."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
            await self._client.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _NoIndex:
    """A listener that reports nothing, since no router chooses among targets here."""

    def on_ready(self) -> None: ...

    def on_status(self, status: Status) -> None: ...

    def on_snapshot(self, snapshot: Snapshot) -> None: ...

    def on_lost(self) -> None: ...


def _end_process() -> None:
    logger.error("the target is stuck, and nothing can restart it without Ray; the process ends")
    os._exit(1)

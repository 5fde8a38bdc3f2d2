"""Reports the engine's load and the changes of its prefix cache to the shell, whenever they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from actors.engine_loop.kv_event_buffer import KVEventBuffer
from actors.shell_messages import Snapshot, Status
from engine.accounting.engine_stats import EngineStats
from protos.block_keys import BlockKey, join_keys


class StatusReporter:
    """Sends changes only. The engine's thread calls `report` between two steps.

    `cached_keys` returns the keys of all cached blocks, including the blocks in `kv_events`.
    """

    def __init__(
        self,
        emit: Callable[[Status | Snapshot], None],
        kv_events: KVEventBuffer,
        cached_keys: Callable[[], Iterable[BlockKey]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._kv_events = kv_events
        self._cached_keys = cached_keys
        self._clock = clock
        self._last_load: tuple[int, ...] | None = None

    def report(self, stats: EngineStats) -> None:
        """Send a frame if load or cache has changed since the last frame."""
        load = (
            stats.num_waiting,
            stats.num_running,
            stats.num_queued_prefill_tokens,
            stats.num_running_decode_tokens,
        )
        if load == self._last_load and not self._kv_events:
            return
        self._last_load = load
        self._emit(Status(self._clock(), stats, self._kv_events.take()))

    def send_snapshot(self) -> None:
        """Send the whole cache, which includes the buffered changes."""
        self._kv_events.take()
        self._emit(Snapshot(join_keys(self._cached_keys())))
        self._last_load = None

"""Reports the engine's load and the changes of its prefix cache to the shell, whenever they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from actors.shell_messages import Snapshot, Status
from engine.accounting.engine_stats import EngineStats
from protos.block_keys import BlockKey, CacheDelta, join_keys, split_keys


class KVEventBuffer:
    """Sums up the block manager's deltas in the target process; belongs to the engine's thread."""

    def __init__(self) -> None:
        self._is_stored: dict[BlockKey, bool] = {}
        self._is_cleared = False

    def record(self, delta: CacheDelta) -> None:
        """Add a delta. Deltas arrive in order."""
        if delta.is_cleared:
            self._is_stored = {}
            self._is_cleared = True
        self._is_stored.update(dict.fromkeys(split_keys(delta.removed), False))
        self._is_stored.update(dict.fromkeys(split_keys(delta.stored), True))

    def __bool__(self) -> bool:
        return bool(self._is_stored) or self._is_cleared

    def take(self) -> CacheDelta:
        """Return the sum since the last call, and start over."""
        delta = CacheDelta(
            stored=join_keys(key for key, is_stored in self._is_stored.items() if is_stored),
            removed=join_keys(key for key, is_stored in self._is_stored.items() if not is_stored),
            is_cleared=self._is_cleared,
        )
        self._is_stored = {}
        self._is_cleared = False
        return delta


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

"""What has happened to a prefix cache since somebody last asked, net: a block that came and went is only gone."""

from __future__ import annotations

from protos.block_keys import BlockKey, join_keys
from protos.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from protos.worker_report import CacheDelta


class KVEventBuffer:
    """The engine's event sink in the target process; belongs to the engine's thread."""

    def __init__(self) -> None:
        self._is_stored: dict[BlockKey, bool] = {}
        self._is_cleared = False

    def record(self, event: KvEvent) -> None:
        """Take an event in; the cache's events come in order."""
        match event:
            case BlocksStored(keys):
                self._is_stored.update(dict.fromkeys(keys, True))
            case BlocksRemoved(keys):
                self._is_stored.update(dict.fromkeys(keys, False))
            case CacheCleared():
                self._is_stored = {}
                self._is_cleared = True

    def __bool__(self) -> bool:
        return bool(self._is_stored) or self._is_cleared

    def take(self) -> CacheDelta:
        """The net change since the last call."""
        delta = CacheDelta(
            stored=join_keys(key for key, is_stored in self._is_stored.items() if is_stored),
            removed=join_keys(key for key, is_stored in self._is_stored.items() if not is_stored),
            is_cleared=self._is_cleared,
        )
        self._is_stored = {}
        self._is_cleared = False
        return delta

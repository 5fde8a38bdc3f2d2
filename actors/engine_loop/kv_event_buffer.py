"""The net change of a prefix cache since the last report: a block that was stored and removed counts as removed."""

from __future__ import annotations

from protos.block_keys import BlockKey, join_keys, split_keys
from protos.cache_delta import CacheDelta


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

"""What a worker tells the router's index, in one message: what changed in its prefix cache, and how busy it is."""

from __future__ import annotations

from dataclasses import dataclass

from protos.block_keys import split_keys
from protos.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from protos.worker_load import WorkerLoad


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """The net change of a prefix cache over some steps: cleared first, if it was, then the joined keys of both kinds.

    No key is in both.
    """

    stored: bytes = b""
    removed: bytes = b""
    is_cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.is_cleared)

    def events(self) -> list[KvEvent]:
        """The same as events."""
        events: list[KvEvent] = [CacheCleared()] if self.is_cleared else []
        if self.removed:
            events.append(BlocksRemoved(split_keys(self.removed)))
        if self.stored:
            events.append(BlocksStored(split_keys(self.stored)))
        return events


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker's word to the index; sent when something has changed, and once a second when nothing has.

    Attributes:
        load: carries the worker's id and epoch.
        load_age_s: how old `load` is when this is sent, on the worker's clock; its own clock time means nothing on
            other nodes.
        is_serving: False while the worker is up and its target is not.
        sequence: counts the reports of an epoch from 0 without holes, so that a lost one shows.
        snapshot: joined keys of the whole cache; None when nobody asked for it.
        deltas: what happened since the last report, and after the snapshot if there is one; oldest first.
    """

    load: WorkerLoad
    load_age_s: float
    is_serving: bool
    sequence: int
    snapshot: bytes | None = None
    deltas: tuple[CacheDelta, ...] = ()

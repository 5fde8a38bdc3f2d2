"""The message of a worker to the router's index: what changed in its prefix cache, and how busy it is."""

from __future__ import annotations

from dataclasses import dataclass

from protos.cache_delta import CacheDelta
from protos.worker_load import WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Sent when something has changed, and once a second when nothing has.

    Attributes:
        load: carries the worker's id and epoch.
        load_age_s: age of `load` when this is sent, on the worker's clock, whose time means nothing on other nodes.
        is_serving: False while the worker is up and its target is not.
        sequence: counts the reports of an epoch from 0 without holes, so that a lost one shows.
        snapshot: joined keys of the whole cache; None where the index has not asked for it.
        deltas: changes since the last report, and after the snapshot if there is one; oldest first.
    """

    load: WorkerLoad
    load_age_s: float
    is_serving: bool
    sequence: int
    snapshot: bytes | None = None
    deltas: tuple[CacheDelta, ...] = ()

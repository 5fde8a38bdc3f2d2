"""What a worker says of its prefix cache: which blocks it now holds, and which it no longer does."""

from __future__ import annotations

from dataclasses import dataclass

from protos.block_keys import BlockKey


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks that are now reusable."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks whose memory was given to other tokens."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Every block is gone (weights changed, or the cache was reset)."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Consecutive events of one worker's cache; the sequence number makes a lost batch visible.

    `epoch` is larger after every restart of the worker (its start time in nanoseconds will do); `sequence` counts the
    batches of one epoch from 0, without holes.
    """

    worker_id: str
    epoch: int
    sequence: int
    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All reusable blocks of one worker, as they are after the batch `sequence` (-1: before the first)."""

    worker_id: str
    epoch: int
    sequence: int
    keys: tuple[BlockKey, ...]

"""What a pair asks of a prefill replica, and what it hears. Blocks are named by object references, never carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.fetch_failure import FetchFailure
from engine.kv_transfer import KVLayout, RemoteLoad


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """Compute these tokens, all in full blocks, and send the blocks from `first_block` on, if your layout is ours."""

    request_id: str
    token_ids: tuple[int, ...]
    first_block: int
    cache_salt: str
    timeout_s: float
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class PrefillAccepted:
    """The first reply, at once: layouts agree, and the order is in the queue. `load` is without it."""

    load: RemoteLoad


@dataclass(frozen=True, slots=True)
class PrefillBlocks:
    """The next blocks: `blocks` refers to a numpy array [n, bytes per block] uint8 in Ray's object store."""

    first_block: int
    blocks: Any  # ray.ObjectRef, which is no generic type at run time
    load: RemoteLoad


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The last reply of an order that could not be carried out."""

    cause: FetchFailure
    detail: str


PrefillReply = PrefillAccepted | PrefillBlocks | PrefillFailed

"""What a pair asks of a prefill replica, and what it hears.

The replies of one order are a stream:

    PrefillAccepted, then any number of (PrefillComputed, its blocks), then PrefillDone or PrefillFailed

What the replica has sent stays valid until the reader ends the stream.

Blocks are replies of their own, not references inside one: Ray may free what a streamed reply refers to before its
reader has it (ray-project/ray pull request 58082), and never the reply itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.kv_transfer.direct_blocks import DirectBlocks
from engine.remote_prefill.fetch_failure import FetchFailure
from engine.remote_prefill.kv_transfer import KVLayout, RemoteLoad


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """Compute these tokens, all in full blocks, and send the blocks from `first_block` on, if your layout is ours."""

    request_id: str
    token_ids: tuple[int, ...]
    first_block: int
    cache_salt: str
    timeout_s: float
    layout: KVLayout
    takes_direct: bool  # blocks may come as `DirectBlocks`


@dataclass(frozen=True, slots=True)
class PrefillAccepted:
    """The first reply, at once: layouts agree, and the order is in the queue. `load` is without it."""

    load: RemoteLoad


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """The blocks from `first_block` on are computed and follow in the next reply."""

    first_block: int
    load: RemoteLoad


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The last reply of an order that could not be carried out."""

    cause: FetchFailure
    detail: str


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The last reply of an order that was carried out."""


PrefillBlocks = np.ndarray | DirectBlocks  # [n, bytes per block] uint8, or where that lies
PrefillReply = PrefillAccepted | PrefillComputed | PrefillBlocks | PrefillDone | PrefillFailed

"""KV blocks that are computed elsewhere: the order, the messages that answer it, and the transport that carries both.

The same messages go from a prefill replica to a pair's transport and from there to its engine. The engine knows no
network: `actors.kv_transfer.kv_transport` carries them over Ray, tests in one process. Blocks travel as rows of bytes,
one row per block: for each layer its keys [P, H, D], then its values.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor

from engine.kv_cache.pool import LayerShape
from engine.remote_prefill.fetch_failure import FetchFailure


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The properties that two engines must share before a block of one means anything to the other."""

    dtype: str  # of the pool
    block_size: int
    layers: tuple[LayerShape, ...]
    model_version: str
    head_version: str = ""  # of a head with files of its own, whose layers are in the block
    rounding: str = "any"  # names the kernels that computed the blocks, where that must be the same to the last bit

    def difference(self, other: KVLayout) -> str | None:
        """Describe the first field in which `other` differs, with both values; None where there is none."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return f"{field.name} is {ours} here and {theirs} there"
        return None


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Blocks [first_block, len(token_ids) / P) of a sequence, all of them full. Room for every one is reserved."""

    fetch_id: int  # of the engine that orders, never used again
    request_id: str
    token_ids: tuple[int, ...]
    first_block: int
    cache_salt: str
    timeout_s: float  # blocks that come later are not used


@dataclass(frozen=True, slots=True)
class RemoteLoad:
    """Load of one prefill replica: tokens before a new prompt's turn, and tokens per second (0: not measured)."""

    replica_id: str
    num_queued_tokens: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class FetchAccepted:
    """The first message of a fetch, at once: a replica has queued the order; `load` does not include it."""

    fetch_id: int
    load: RemoteLoad


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The blocks of a fetch from `first_block` on are computed, and follow."""

    fetch_id: int
    first_block: int
    load: RemoteLoad


@dataclass(frozen=True, slots=True)
class KVChunk:
    """The next blocks of a fetch, `blocks` [n, bytes per block] uint8, and the seconds between header and blocks."""

    header: ChunkHeader
    blocks: Tensor
    transfer_s: float

    @property
    def fetch_id(self) -> int:
        """The fetch that the blocks belong to."""
        return self.header.fetch_id


@dataclass(frozen=True, slots=True)
class FetchEnd:
    """The last message of a fetch; `failure` is None where all blocks have come."""

    fetch_id: int
    failure: FetchFailure | None = None
    detail: str = ""


FetchNews = FetchAccepted | KVChunk | FetchEnd


class KVTransport(Protocol):
    """Carries blocks from the engine that computes them. No method waits or raises; all belong to the engine's thread.

    The news of a fetch are at most one `FetchAccepted`, chunks in block order without holes, and exactly one `FetchEnd`
    unless it is cancelled. A transport that fails says so with a `FetchEnd`.
    """

    def start(self, order: FetchOrder) -> None:
        """Begin a fetch."""

    def poll(self, max_news: int) -> list[FetchNews]:
        """Return the oldest news that have arrived and were not polled yet, at most `max_news`."""

    def num_available_blocks(self, request_id: str) -> int | None:
        """Return how many leading blocks of a request can be had; None where there is no such limit."""

    def cancel(self, fetch_id: int) -> None:
        """Give a fetch up: `poll` says nothing more of it. Ids that are unknown or have ended are ignored."""


class KVPool(Protocol):
    """Copies whole blocks of a model's KV in and out; `engine.model.runner.model_runner.ModelRunner` does."""

    @property
    def kv_layout(self) -> KVLayout:
        """Model, dtype and shape of these blocks."""

    @property
    def bytes_per_block(self) -> int:
        """Length of a row."""

    def export_blocks(self, block_ids: Seq[int]) -> Tensor:
        """Return a copy of these blocks (at least one), [n, bytes per block] uint8 on the pool's device."""

    def import_blocks(self, block_ids: Seq[int], blocks: Tensor) -> None:
        """Overwrite these blocks with `blocks` [n, bytes per block] uint8, which may lie on any device."""

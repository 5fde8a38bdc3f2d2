"""Messages and transport for KV blocks that another engine computes, and their export as soon as they are computed.

The same messages go from a prefill replica to a pair's transport and from there to its engine. The engine does not know
the network: `actors.kv_transport` uses Ray, tests use one process. A block is a row of bytes: for each
layer its keys [P, H, D], then its values. A model with recurrent layers sends the state after a chunk's last block too.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import Protocol

from torch import Tensor

from engine.accounting.engine_stats import FetchFailure
from engine.batch.side_stream import PendingTensor
from engine.kv_cache.pool import LayerShape
from engine.kv_cache.state_pool import StateShape
from engine.sequence.batch import Batch, ScheduledSequence
from engine.sequence.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Properties that two engines must share to exchange blocks."""

    dtype: str  # the pool's
    block_size: int
    layers: tuple[LayerShape, ...]
    model_version: str
    states: tuple[StateShape, ...] = ()  # of recurrent layers
    head_version: str = ""  # of a head with its own files, whose layers are in the block
    rounding: str = "any"  # names the kernels that computed the blocks, if their last bits must agree

    def difference(self, other: KVLayout) -> str | None:
        """Describe the first field that differs in `other`, with both values; None if they are equal."""
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if ours != theirs:
                return f"{each.name} is {ours} here and {theirs} there"
        return None


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Blocks [first_block, len(token_ids) / P) of a sequence, all full. Slots are reserved for all of them."""

    fetch_id: int  # unique within the ordering engine
    request_id: str
    token_ids: tuple[int, ...]
    first_block: int
    cache_salt: str
    timeout_s: float  # later blocks are not used


@dataclass(frozen=True, slots=True)
class RemoteLoad:
    """Load of one prefill replica: tokens queued before a new prompt, and tokens per second (0: not measured)."""

    replica_id: str
    num_queued_tokens: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class FetchAccepted:
    """A fetch's first message, sent at once: a replica has queued the order; `load` does not include it."""

    fetch_id: int
    load: RemoteLoad


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The fetch's blocks from `first_block` on are computed and follow, then perhaps the state after them."""

    fetch_id: int
    first_block: int
    load: RemoteLoad
    has_state: bool = False


@dataclass(frozen=True, slots=True)
class KVChunk:
    """The next blocks of a fetch, [n, bytes per block] uint8, and the seconds between header and blocks.

    `state` is the state of recurrent layers after the last of them, [bytes per state] uint8.
    """

    header: ChunkHeader
    blocks: Tensor
    transfer_s: float
    state: Tensor | None = None

    @property
    def fetch_id(self) -> int:
        """The fetch of the blocks."""
        return self.header.fetch_id


@dataclass(frozen=True, slots=True)
class FetchEnd:
    """A fetch's last message; `failure` is None if all blocks were sent."""

    fetch_id: int
    failure: FetchFailure | None = None
    detail: str = ""


FetchNews = FetchAccepted | KVChunk | FetchEnd


class KVTransport(Protocol):
    """Carries blocks from the engine that computes them. No method blocks or raises; call all from the engine's thread.

    A fetch's messages are at most one `FetchAccepted`, chunks in block order without holes, and exactly one `FetchEnd`
    unless it is cancelled. A failing transport sends a `FetchEnd`.
    """

    def start(self, order: FetchOrder) -> None:
        """Begin a fetch."""

    def poll(self, max_news: int) -> list[FetchNews]:
        """Return the oldest messages that have arrived since the last poll, at most `max_news`."""

    def num_available_blocks(self, request_id: str) -> int | None:
        """Return how many leading blocks of a request are available; None without a limit."""

    def cancel(self, fetch_id: int) -> None:
        """Cancel a fetch: `poll` returns no more of its messages. Unknown and ended ids are ignored."""


class KVPool(Protocol):
    """Copies whole KV blocks in and out; implemented by `engine.model.runner.model_runner.ModelRunner`."""

    @property
    def kv_layout(self) -> KVLayout:
        """Model, dtype and shape of these blocks."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""

    def export_blocks(self, block_ids: Seq[int]) -> Tensor:
        """Return a copy of these blocks (at least one), [n, bytes per block] uint8 on the pool's device."""

    def import_blocks(self, block_ids: Seq[int], blocks: Tensor) -> None:
        """Overwrite these blocks with `blocks` [n, bytes per block] uint8, on any device."""

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state of the recurrent layers; 0 for models without any."""

    def export_state(self, slot: int) -> Tensor:
        """Return a copy of the state in a slot, [bytes per state] uint8 on the pool's device."""

    def import_state(self, slot: int, state: Tensor) -> None:
        """Overwrite the state in a slot with `state` [bytes per state] uint8, on any device."""


@dataclass(slots=True)
class KVFetch:
    """Blocks [next_block, end_block) of `sequence` are ordered and have not arrived.

    `followers` lack the same blocks and adopt them from the prefix cache as they arrive. Blocks that arrive after
    `deadline_s` are not used. The deadline is `timeout_s` after the order, and earlier until a replica accepts it.
    """

    fetch_id: int
    sequence: Sequence
    next_block: int
    end_block: int
    began_s: float
    timeout_s: float
    deadline_s: float
    followers: list[Sequence] = field(default_factory=list)

    @property
    def num_missing_blocks(self) -> int:
        return self.end_block - self.next_block

    def mistake(self, chunk: KVChunk, bytes_per_block: int, bytes_per_state: int) -> str | None:
        """Describe why `chunk` is not the next blocks of this fetch; None if it is."""
        if chunk.header.first_block != self.next_block:
            return f"received block {chunk.header.first_block}, expected block {self.next_block}"
        if not 0 < len(chunk.blocks) <= self.num_missing_blocks:
            return f"received {len(chunk.blocks)} blocks, but only {self.num_missing_blocks} were missing"
        if chunk.blocks.shape[1:] != (bytes_per_block,):
            return f"received blocks of shape {tuple(chunk.blocks.shape[1:])}, expected {bytes_per_block} bytes each"
        if chunk.state is not None and chunk.state.shape != (bytes_per_state,):
            return f"received a state of shape {tuple(chunk.state.shape)}, expected {bytes_per_state} bytes"
        return None


@dataclass(frozen=True, slots=True)
class ExportedBlocks:
    """Blocks [first_block, first_block + n) of a sequence; `blocks` [n, bytes per block] uint8 is a copy.

    `state` is a copy of the recurrent layers' state after the last block, [bytes per state] uint8. A GPU may still be
    computing both.
    """

    request_id: str
    first_block: int
    blocks: PendingTensor
    state: PendingTensor | None = None


class BlockExporter:
    """Passes each full block of the watched sequences to `sink` once, in order, at most `max_blocks` per call.

    `watch` and `forget` may be called from any thread.

    `collect` is for `EngineCore.on_computed`: the blocks are written by then and still belong to the sequence. Blocks
    from the prefix cache are exported with the first computed chunk.
    """

    def __init__(self, pool: KVPool, max_blocks: int, sink: Callable[[ExportedBlocks], None]) -> None:
        self._pool = pool
        self._block_size = pool.kv_layout.block_size
        self._max_blocks = max_blocks
        self._sink = sink
        self._next_blocks: dict[str, int] = {}  # of the watched sequences

    def watch(self, request_id: str, first_block: int) -> None:
        """Export the blocks of this sequence from `first_block` on; call it before the engine gets the sequence."""
        self._next_blocks[request_id] = first_block

    def forget(self, request_id: str) -> None:
        """Export no more blocks of this sequence."""
        self._next_blocks.pop(request_id, None)

    def collect(self, batch: Batch) -> None:
        """Export the blocks that this batch has completed."""
        for scheduled in batch.scheduled:
            if (first := self._next_blocks.get(scheduled.sequence.request_id)) is not None:
                self._export(scheduled, first)

    def export(self, request_id: str, first_block: int, block_ids: Seq[int], state_slot: int | None = None) -> None:
        """Export blocks of the pool as blocks `first_block` onwards of a request, and the state after the last."""
        for start in range(0, len(block_ids), self._max_blocks):
            blocks = self._pool.export_blocks(block_ids[start : start + self._max_blocks])
            is_last = start + len(blocks) == len(block_ids)
            state = self._pool.export_state(state_slot) if is_last and state_slot is not None else None
            # Copied in the order of the passes, so a later pass may write to the blocks.
            pending = None if state is None else PendingTensor(state)
            self._sink(ExportedBlocks(request_id, first_block + start, PendingTensor(blocks), pending))

    def _export(self, scheduled: ScheduledSequence, first: int) -> None:
        sequence = scheduled.sequence
        end = max(first, (scheduled.start + scheduled.num_tokens) // self._block_size)
        self._next_blocks[sequence.request_id] = end
        state_slot = sequence.states.get(end * self._block_size)
        self.export(sequence.request_id, first, sequence.block_table[first:end], state_slot)

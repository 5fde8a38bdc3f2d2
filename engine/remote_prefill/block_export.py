"""Exports a prefill replica's blocks: copies them out of the pool as soon as they are computed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from engine.remote_prefill.kv_transfer import KVPool
from engine.sequence.batch import Batch, ScheduledSequence


@dataclass(frozen=True, slots=True)
class ExportedBlocks:
    """Blocks [first_block, first_block + n) of a sequence; `blocks` [n, bytes per block] uint8 is a copy.

    `state` is a copy of the recurrent layers' state after the last block, [bytes per state] uint8.
    """

    request_id: str
    first_block: int
    blocks: Tensor
    state: Tensor | None = None


@dataclass(slots=True)
class _ExportProgress:
    next_block: int


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
        self._watched: dict[str, _ExportProgress] = {}

    def watch(self, request_id: str, first_block: int) -> None:
        """Export the blocks of this sequence from `first_block` on; call it before the engine gets the sequence."""
        self._watched[request_id] = _ExportProgress(first_block)

    def forget(self, request_id: str) -> None:
        """Export no more blocks of this sequence."""
        self._watched.pop(request_id, None)

    def collect(self, batch: Batch) -> None:
        """Export the blocks that this batch has completed."""
        for scheduled in batch.scheduled:
            if progress := self._watched.get(scheduled.sequence.request_id):
                self._export(scheduled, progress)

    def export(self, request_id: str, first_block: int, block_ids: Seq[int], state_slot: int | None = None) -> None:
        """Export blocks of the pool as blocks `first_block` onwards of a request, and the state after the last."""
        for start in range(0, len(block_ids), self._max_blocks):
            blocks = self._pool.export_blocks(block_ids[start : start + self._max_blocks])
            is_last = start + len(blocks) == len(block_ids)
            state = self._pool.export_state(state_slot) if is_last and state_slot is not None else None
            self._sink(ExportedBlocks(request_id, first_block + start, blocks, state))

    def _export(self, scheduled: ScheduledSequence, progress: _ExportProgress) -> None:
        sequence, first = scheduled.sequence, progress.next_block
        progress.next_block = end = max(first, (scheduled.start + scheduled.num_tokens) // self._block_size)
        state_slot = sequence.states.get(end * self._block_size)
        self.export(sequence.request_id, first, sequence.block_table[first:end], state_slot)

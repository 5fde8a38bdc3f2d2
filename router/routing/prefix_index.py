"""The blocks that each worker holds: the router's view of every prefix cache, built from their deltas.

    block key      bits of the workers that hold it          a prompt's keys, first to last
    k0        ->   1 1 1                                     k0: all three hold it
    k1        ->   0 1 1                                     k1: the first worker drops out with 1 block
    k2        ->   0 1 0                                     k2: the third with 2, the second goes on

Plain data structures, without process, clock, Ray, load or cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from protos.block_keys import BlockKey, CacheDelta, PrefixHolder, split_keys

_UNKNOWN_EPOCH = -1  # of a worker that got a request before it has reported


@dataclass(slots=True)
class _View:
    """The index's view of one worker. The dicts are ordered, least recently used first."""

    slot: int
    epoch: int
    is_gone: bool = False
    next_sequence: int = 0
    needs_snapshot: bool = False
    held: dict[BlockKey, None] = field(default_factory=dict)  # reported by the worker
    pending: dict[BlockKey, float] = field(default_factory=dict)  # predicted by the router -> end of the prediction


@dataclass(frozen=True, slots=True, order=True)
class _Hold:
    """Blocks that a request just sent will leave on its worker, ordered by the end of the prediction."""

    lapses_at_s: float
    view: _View = field(compare=False)
    keys: tuple[BlockKey, ...] = field(compare=False)


class PrefixIndex:
    """Maps block keys to workers, with predicted blocks, restarts, lost events and bounded memory.

    A block counts for a worker while the worker's deltas report it (`held`), or for a short time after a request was
    sent there (`pending`). The bits of one key are the union of both; `check_integrity` asserts it.

    Args:
        max_blocks_per_worker: more blocks than any worker's cache has. A view that exceeds it (of a worker that never
            reports removals) loses its least recently routed blocks.
    """

    def __init__(self, max_blocks_per_worker: int = 2_000_000) -> None:
        self._max_blocks = max_blocks_per_worker
        self._holders: dict[BlockKey, int] = {}
        self._views: dict[str, _View] = {}
        self._worker_at: list[str] = []  # by slot; "" in a free slot
        self._holds: list[_Hold] = []  # a heap

    # -- lookups

    def matches(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Count the leading blocks of `keys` that each worker holds; workers without the first block are absent."""
        result: dict[str, int] = {}
        holders = self._holders
        alive = -1
        for depth, key in enumerate(keys):
            still = alive & holders.get(key, 0)
            if still != alive:
                if depth:
                    self._record(result, alive & ~still, depth)
                if not still:
                    return result
                alive = still
        if keys:
            self._record(result, alive, len(keys))
        return result

    def longest_held(self, keys: Sequence[BlockKey], worker_ids: Iterable[str], more_than: int) -> PrefixHolder | None:
        """Return the worker that reported the most leading blocks, if more than `more_than`; None otherwise.

        Predicted blocks do not count: their worker may not have computed them yet.
        """
        best: PrefixHolder | None = None
        for worker_id in worker_ids:
            held = view.held if (view := self._views.get(worker_id)) else {}
            num_blocks = next((depth for depth, key in enumerate(keys) if key not in held), len(keys))
            if num_blocks > max(more_than, best.num_blocks if best else 0):
                best = PrefixHolder(worker_id, num_blocks)
        return best

    def needs_snapshot(self) -> list[str]:
        """Return the workers with a gap since their last snapshot, and those whose first report was not batch 0."""
        return [worker_id for worker_id, view in self._views.items() if view.needs_snapshot]

    def is_in_doubt(self, worker_id: str) -> bool:
        """True if `worker_id` needs a snapshot."""
        view = self._views.get(worker_id)
        return view is not None and view.needs_snapshot

    def __len__(self) -> int:
        """Return the number of distinct blocks known."""
        return len(self._holders)

    # -- reports of workers

    def apply(self, worker_id: str, epoch: int, sequence: int, deltas: Iterable[CacheDelta]) -> None:
        """Apply the changes of a worker's cache.

        A batch of a newer epoch first drops all the worker's blocks. A batch after a gap is applied too (its facts are
        still true) and marks the worker as needing a snapshot. A batch of an older epoch, or a repeated one, changes
        nothing.

        Args:
            worker_id: the worker.
            epoch: increases with every restart of the worker.
            sequence: number of the batch within its epoch, from 0 without holes, so that a lost one is noticed.
            deltas: the batch, oldest first.
        """
        view = self._view(worker_id, epoch)
        if epoch < view.epoch or sequence < view.next_sequence:
            return
        view.needs_snapshot |= sequence > view.next_sequence
        view.next_sequence = sequence + 1
        for delta in deltas:
            self._apply_delta(view, delta)

    def resync(self, worker_id: str, epoch: int, sequence: int, keys: bytes) -> None:
        """Replace everything known of a worker by the joined `keys` of its whole cache after batch `sequence`.

        A snapshot older than an applied batch changes nothing; -1 is before the first batch.
        """
        view = self._view(worker_id, epoch)
        if epoch < view.epoch or sequence + 1 < view.next_sequence:
            return
        self._clear_held(view)
        self._store(view, split_keys(keys))
        view.next_sequence = sequence + 1
        view.needs_snapshot = False

    def forget(self, worker_id: str) -> None:
        """Drop a worker that has left; unknown workers are ignored."""
        view = self._views.pop(worker_id, None)
        if view is None:
            return
        view.is_gone = True
        self._drop_bits(view.slot, view.held)
        self._drop_bits(view.slot, view.pending)
        self._worker_at[view.slot] = ""

    # -- predictions of the router

    def reserve(self, worker_id: str, keys: Sequence[BlockKey], now_s: float, hold_s: float) -> None:
        """Count `keys` as present on `worker_id` for `hold_s` seconds, or until its deltas confirm them.

        Also marks the blocks as recently used, as the worker's own cache will.
        """
        view = self._views.get(worker_id) or self._view(worker_id, _UNKNOWN_EPOCH)
        self._refresh(view, keys)
        missing = tuple(key for key in keys if key not in view.held)
        if not missing:
            return
        bit = 1 << view.slot
        for key in missing:
            view.pending[key] = now_s + hold_s
            self._holders[key] = self._holders.get(key, 0) | bit
        heapq.heappush(self._holds, _Hold(now_s + hold_s, view, missing))

    def expire(self, now_s: float) -> None:
        """Drop predictions that have ended by `now_s`; call it before a lookup."""
        while self._holds and self._holds[0].lapses_at_s <= now_s:
            self._lapse(heapq.heappop(self._holds), now_s)

    def check_integrity(self) -> None:
        """Assert that the bits of every key are exactly the workers that hold or expect it (slow: for tests)."""
        expected: dict[BlockKey, int] = {}
        for view in self._views.values():
            for key in (*view.held, *view.pending):
                expected[key] = expected.get(key, 0) | 1 << view.slot
            assert not view.held.keys() & view.pending.keys()
        assert expected == self._holders

    # -- internals

    def _record(self, result: dict[str, int], bits: int, depth: int) -> None:
        worker_at = self._worker_at
        for slot in _slots(bits):
            result[worker_at[slot]] = depth

    def _view(self, worker_id: str, epoch: int) -> _View:
        """Return the worker's view: new for a new worker, emptied for a newer `epoch`."""
        view = self._views.get(worker_id)
        if view is not None and view.epoch == _UNKNOWN_EPOCH:
            view.epoch = epoch  # its first report: blocks reserved for it stay
        if view is not None and view.epoch < epoch:
            self.forget(worker_id)
            view = None
        if view is None:
            view = self._views[worker_id] = _View(self._free_slot(worker_id), epoch)
        return view

    def _free_slot(self, worker_id: str) -> int:
        for slot, owner in enumerate(self._worker_at):
            if not owner:
                self._worker_at[slot] = worker_id
                return slot
        self._worker_at.append(worker_id)
        return len(self._worker_at) - 1

    def _apply_delta(self, view: _View, delta: CacheDelta) -> None:
        if delta.is_cleared:
            self._clear_held(view)
        self._drop_bits(view.slot, [key for key in split_keys(delta.removed) if view.held.pop(key, key) is None])
        self._store(view, split_keys(delta.stored))

    def _store(self, view: _View, keys: Iterable[BlockKey]) -> None:
        bit = 1 << view.slot
        holders, held, pending = self._holders, view.held, view.pending
        for key in keys:
            if pending:
                pending.pop(key, None)
            held[key] = None
            holders[key] = holders.get(key, 0) | bit
        if len(held) > self._max_blocks:
            self._evict(view)

    def _evict(self, view: _View) -> None:
        # Many at once: the cost per block stays constant.
        num_evicted = len(view.held) - self._max_blocks + self._max_blocks // 16
        oldest = list(islice(view.held, num_evicted))
        for key in oldest:
            del view.held[key]
        self._drop_bits(view.slot, oldest)

    def _refresh(self, view: _View, keys: Sequence[BlockKey]) -> None:
        """Make `keys` the most recently used, the first of them last to be evicted.

        A block is useless without those before it.
        """
        if len(view.held) * 2 < self._max_blocks:
            return  # eviction is far off: skip the work
        held = view.held
        for key in reversed(keys):
            if key in held:
                del held[key]
                held[key] = None

    def _lapse(self, hold: _Hold, now_s: float) -> None:
        view = hold.view
        if view.is_gone:
            return
        lapsed = [key for key in hold.keys if view.pending.get(key, now_s + 1) <= now_s]
        for key in lapsed:
            del view.pending[key]
        self._drop_bits(view.slot, lapsed)

    def _clear_held(self, view: _View) -> None:
        self._drop_bits(view.slot, view.held)
        view.held = {}

    def _drop_bits(self, slot: int, keys: Iterable[BlockKey]) -> None:
        keep = ~(1 << slot)
        holders = self._holders
        for key in keys:
            rest = holders[key] & keep
            if rest:
                holders[key] = rest
            else:
                del holders[key]


def _slots(bits: int) -> list[int]:
    """Return the positions of the ones in `bits`, lowest first."""
    if bits.bit_count() > 24:  # numpy finds more bits than this faster than a loop
        octets = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        slots: list[int] = np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()
        return slots
    slots = []
    while bits:
        lowest = bits & -bits
        slots.append(lowest.bit_length() - 1)
        bits ^= lowest
    return slots

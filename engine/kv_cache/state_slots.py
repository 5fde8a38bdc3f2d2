"""The slots that hold states of recurrent layers: free ones, states of running sequences, and snapshots of prefixes.

It does not know tensors; `engine.kv_cache.state_pool` gives each slot its memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.sequence.token_blocks import ZEROS
from protos.block_keys import BlockKey


class StateSlots:
    """Slots with their number of holders. A snapshot is one holder of its slot, sequences are others.

    A snapshot has the key of the block whose last token it follows. Where slots are short, the snapshot least recently
    used by a prefix goes first, unless a sequence still holds it.

    Conservation, at any time: free slots and held ones are all slots except `ZEROS`.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_holders = [0] * num_slots
        self._free = list(range(num_slots - 1, ZEROS, -1))
        self._snapshots: OrderedDict[BlockKey, int] = OrderedDict()
        self._is_snapshot = [False] * num_slots
        self._num_idle = 0  # snapshots that no sequence holds

    @property
    def max_sequences(self) -> int:
        """Sequences that can run at the same time: each needs a state to read, one to write, and one to spare."""
        return (self.num_slots - 1) // 3

    @property
    def num_available(self) -> int:
        """Slots that are free, and snapshots that no sequence holds."""
        return len(self._free) + self._num_idle

    def take(self, num_spare: int = 0) -> int | None:
        """Return a slot with one holder; None unless `num_spare` more remain available."""
        if self.num_available <= num_spare:
            return None
        if not self._free:
            self._evict()
        slot = self._free.pop()
        self._num_holders[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Hold a slot once more."""
        self._num_idle -= self._is_idle(slot)
        self._num_holders[slot] += 1

    def drop(self, slot: int) -> None:
        """Release one hold; the last one frees the slot."""
        self._num_holders[slot] -= 1
        self._num_idle += self._is_idle(slot)
        if self._num_holders[slot] == 0:
            self._free.append(slot)

    def keep(self, key: BlockKey, slot: int) -> None:
        """Make a held slot the snapshot of a block, unless the block has one."""
        if key not in self._snapshots:
            self.hold(slot)
            self._snapshots[key] = slot
            self._is_snapshot[slot] = True

    def has(self, key: BlockKey) -> bool:
        """True if a block has a snapshot."""
        return key in self._snapshots

    def adopt(self, key: BlockKey) -> int:
        """Hold the snapshot of a block for one more sequence, and return its slot."""
        self._snapshots.move_to_end(key)
        slot = self._snapshots[key]
        self.hold(slot)
        return slot

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Drop the snapshots of blocks that can no longer be found."""
        for key in keys:
            if (slot := self._snapshots.pop(key, None)) is not None:
                self._num_idle -= self._is_idle(slot)
                self._is_snapshot[slot] = False
                self.drop(slot)

    def check_integrity(self, held: Iterable[int], cached_keys: frozenset[BlockKey]) -> None:
        """Assert the invariants, given the slots that sequences hold and the keys of all findable blocks; for tests."""
        counts = [0] * self.num_slots
        for slot in (*held, *self._snapshots.values()):
            counts[slot] += 1
        assert counts == self._num_holders, "holders differ from the sequences and snapshots"
        assert counts[ZEROS] == 0, "a sequence holds the zeros"
        assert {*self._free} == {slot for slot in range(1, self.num_slots) if not counts[slot]}, "a slot is lost"
        assert self._snapshots.keys() <= cached_keys, "a snapshot outlives its block"
        assert self._num_idle == sum(map(self._is_idle, self._snapshots.values())), "idle snapshots are miscounted"

    def _is_idle(self, slot: int) -> bool:
        """True for a snapshot that no sequence holds."""
        return self._is_snapshot[slot] and self._num_holders[slot] == 1

    def _evict(self) -> None:
        key = next(key for key, slot in self._snapshots.items() if self._is_idle(slot))
        self.forget([key])

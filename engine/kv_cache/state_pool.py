"""States of recurrent layers: their number, the owner of each slot, and their memory.

Per layer the memory is one tensor of convolution rows and one of matrices, by slot. Settings that recurrent layers do
not support are refused by name.
"""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.batch.side_stream import arrived
from engine.config import CacheConfig, EngineConfig
from engine.sequence.sequence import ZEROS
from protos.block_keys import BlockKey
from protos.errors import ConfigError


class StateSlots:
    """Slots with their number of holders. A snapshot is one holder of its slot, sequences are others.

    A snapshot has the key of the block whose last token it follows. Where slots are short, the snapshot least recently
    used by a prefix goes first, unless a sequence still holds it.

    Conservation, at any time: free slots and held ones are all slots except `ZEROS`.
    """

    def __init__(self, num_slots: int, most_sequences: int) -> None:
        """At most `most_sequences` ever run at the same time."""
        self.num_slots = num_slots
        self._most_sequences = most_sequences
        self._num_holders = [0] * num_slots
        self._free = list(range(num_slots - 1, ZEROS, -1))
        self._snapshots: OrderedDict[BlockKey, int] = OrderedDict()
        self._is_snapshot = [False] * num_slots
        self._num_idle = 0  # snapshots that no sequence holds

    @property
    def max_sequences(self) -> int:
        """Sequences that can run at the same time: each needs a state to read, one to write, and one to spare."""
        return min(self._most_sequences, (self.num_slots - 1) // 3)

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


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's state after a token: the last inputs of its convolution and, in most families, a matrix per head."""

    num_rows: int
    width: int
    matrices: tuple[int, ...] = ()

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one state; matrices are float32."""
        matrices = math.prod(self.matrices) * torch.float32.itemsize if self.matrices else 0
        return self.num_rows * self.width * dtype.itemsize + matrices


class StatePool:
    """The states of all layers. Slot `ZEROS` stays zero; on a processor, memory is allocated at the first write.

    `rows` are [N, R, D] per layer, `matrices` [N, *matrices] float32, or None for a layer without any.
    """

    def __init__(self, shapes: Seq[StateShape], num_slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.rows = [zeros((num_slots, each.num_rows, each.width), dtype, device) for each in shapes]
        self.matrices: list[Tensor | None] = [
            zeros((num_slots, *each.matrices), torch.float32, device) if each.matrices else None for each in shapes
        ]

    @cached_property
    def addresses(self) -> tuple[list[int], list[int | None]]:
        """The rows and the matrices of every layer in memory, for a kernel."""
        matrices = [None if each is None else each.data_ptr() for each in self.matrices]
        return [each.data_ptr() for each in self.rows], matrices

    def export_state(self, slot: int) -> Tensor:
        """Return a copy of a slot's state in all layers, [bytes of a state] uint8 on the pool's device."""
        return torch.cat([part[slot].flatten().view(torch.uint8) for part in self._parts])

    def import_state(self, slot: int, state: Tensor) -> None:
        """Overwrite a slot's state, in the layout of `export_state`."""
        parts = arrived(state, self.device).split([part[slot].nbytes for part in self._parts])
        for part, new in zip(self._parts, parts, strict=True):
            part[slot] = new.view(part.dtype).view(part.shape[1:])

    @property
    def _parts(self) -> list[Tensor]:
        return [*self.rows, *(each for each in self.matrices if each is not None)]


def num_slots(config: CacheConfig, bytes_per_state: int) -> int:
    """Return the number of slots: those that the engine asks for, at most half of a budget of bytes.

    Raises:
        ConfigError: the budget does not hold the states of one sequence.
    """
    if config.num_blocks is not None or config.memory_bytes is None:
        return config.num_states
    fitting = config.memory_bytes // 2 // bytes_per_state
    least = 4  # states of one sequence, and the zeros
    if fitting < least:
        raise ConfigError(
            f"half of cache.memory_gib, {config.memory_bytes // 2} bytes, holds {fitting} states of the model's "
            f"recurrent layers, and one sequence takes {least} of {bytes_per_state} bytes; raise it"
        )
    return min(fitting, config.num_states)


def zeros(size: Seq[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a processor the system allocates each page at its first write."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(size)


def state_bytes(shapes: Seq[StateShape], dtype: torch.dtype) -> int:
    """Return the bytes of one slot in all layers."""
    return sum(each.num_bytes(dtype) for each in shapes)


def check_target(config: EngineConfig) -> None:
    """Raise ConfigError if the drafts of a target with recurrent layers are trees, or reasoning steps."""
    speculation = config.speculation
    refused = (
        ("speculation.tree", speculation.tree_nodes, "whose states follow one text and not several branches"),
        ("speculation.steps", speculation.steps, "which would keep a state for each token of a step until its score"),
    )
    for name, value, reason in refused:
        if value:
            raise ConfigError(f"{name} is set, but {config.model.path!r} has recurrent layers, {reason}; remove {name}")


def check_draft(path: str, *, has_trees: bool) -> None:
    """Raise ConfigError if the drafts of a draft model with recurrent layers, at `path`, are trees."""
    if has_trees:
        raise ConfigError(
            f"speculation.tree is set, but the draft {path!r} has recurrent layers, whose states follow one text and "
            "not several branches; remove speculation.tree, or choose a draft whose layers all have attention"
        )


def num_states(config: EngineConfig) -> int:
    """Return the most states that a model's sequences use: before a pass, after each row, and snapshots of prefixes."""
    per_sequence = 2 + config.speculation.max_num_tokens + 4  # four snapshots
    return 1 + config.scheduler.max_num_sequences * per_sequence

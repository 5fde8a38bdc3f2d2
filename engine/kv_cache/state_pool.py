"""The memory of recurrent layers' states: per layer one tensor of convolution rows and one of matrices, by slot.

`engine.kv_cache.state_slots` knows the owner of each slot.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import CacheConfig
from protos.errors import ConfigError

MIN_SLOTS = 4  # of one sequence, and the zeros


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

    def export_state(self, slot: int) -> Tensor:
        """Return a copy of a slot's state in all layers, [bytes of a state] uint8 on the pool's device."""
        return torch.cat([part[slot].flatten().view(torch.uint8) for part in self._parts])

    def import_state(self, slot: int, state: Tensor) -> None:
        """Overwrite a slot's state, in the layout of `export_state`."""
        parts = state.to(self.device).split([part[slot].nbytes for part in self._parts])
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
    if fitting < MIN_SLOTS:
        raise ConfigError(
            f"half of cache.memory_gib, {config.memory_bytes // 2} bytes, holds {fitting} states of the model's "
            f"recurrent layers, and one sequence takes {MIN_SLOTS} of {bytes_per_state} bytes; raise it"
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

"""The physical KV pool: for every layer one tensor of keys and one of values, cut into N blocks of P tokens.

It does not know who owns a block: `engine.block_manager` decides that, `engine.attention` reads and writes.

    slot:    0    1  ...  P-1 |  P  ...
           +---------------------------+
    keys   |      block 0      | block 1 ...     [N, P, H, D] per layer; slot s is row s % P of block s // P
           +---------------------------+
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import CacheConfig
from engine.index import Index, index_of, index_tensor
from engine.int8_heads import UNIT_BYTES, from_int8_heads, to_int8_heads
from protos.errors import ConfigError

_MIN_VIEW_BYTES = 1 << 18  # per layer: copying more costs more time than one more attention call


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one token in one layer. The head sizes of keys and values differ in some families (DeepSeek)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """The pool's tensors. Fresh memory is zero, and a slot keeps what was written last: freed blocks are not cleared.

    `dtype` is that of keys and values as they are written and read; a quantised pool keeps them as `engine.int8_heads`.

    `min_view_tokens` is the length from which a run of blocks is better read in place than copied together with others.
    """

    def __init__(
        self,
        shapes: Seq[LayerShape],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_quantized: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.min_view_tokens = _MIN_VIEW_BYTES // (max(shape.num_elements for shape in shapes) * dtype.itemsize)
        self._is_quantized = is_quantized
        self._stored_dtype = torch.int8 if is_quantized else dtype
        self.keys: list[Tensor] = []  # L x [N, P, H, D], or [N, P, H, D + UNIT_BYTES] int8
        self.values: list[Tensor] = []  # L x [N, P, H, D], D of the values
        for shape in shapes:
            head_shape = (num_blocks, block_size, shape.num_kv_heads)
            for pools, dim in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                width = dim + UNIT_BYTES * is_quantized
                pools.append(torch.zeros(*head_shape, width, dtype=self._stored_dtype, device=device))
        # The same memory by slot, [N * P, H, D]: views made once, as a small model's layer takes 100 us in all.
        self._slots = [[pool.flatten(0, 1) for pool in layer] for layer in zip(self.keys, self.values, strict=True)]

    def write(self, layer: int, slots: Index, key: Tensor, value: Tensor) -> None:
        """Store the KV of T new tokens, key and value [T, H, D]; `slots` is a slice where they are one run."""
        for by_slot, new in zip(self._slots[layer], (key, value), strict=True):
            new = to_int8_heads(new) if self._is_quantized else new
            if isinstance(slots, slice):
                by_slot[slots] = new
            else:
                by_slot.index_copy_(0, slots, new)

    def read_slots(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of the keys and the values of some slots, in their order, each [S, H, D]."""
        keys, values = (self._loaded(by_slot.index_select(0, slots)) for by_slot in self._slots[layer])
        return keys, values

    def read_blocks(self, layer: int, blocks: Index) -> tuple[Tensor, Tensor]:
        """The keys and the values of some blocks, each [n, P, H, D]: in place where they are a run that is not
        quantised, a copy elsewhere.
        """
        keys, values = (
            self._loaded(pool[blocks] if isinstance(blocks, slice) else pool.index_select(0, blocks))
            for pool in (self.keys[layer], self.values[layer])
        )
        return keys, values

    def _loaded(self, stored: Tensor) -> Tensor:
        return from_int8_heads(stored, self.dtype) if self._is_quantized else stored

    def move(self, from_slots: Seq[int], to_slots: Seq[int]) -> None:
        """Copy the KV of slots to other ones (none of them twice), in all layers; the two may overlap."""
        source, target = index_tensor(from_slots, self.device), index_tensor(to_slots, self.device)
        for layer in self._slots:
            for by_slot in layer:
                by_slot.index_copy_(0, target, by_slot.index_select(0, source))

    def export_blocks(self, block_ids: Seq[int]) -> Tensor:
        """A copy of these blocks on the pool's device, [n, bytes of a block] uint8: by layer its keys, then its values.

        No pass may write to these blocks while they are copied.
        """
        index = index_of(block_ids, self.device)
        parts = [pool[index].flatten(1) for layer in zip(self.keys, self.values, strict=True) for pool in layer]
        return torch.cat(parts, dim=1).view(torch.uint8)

    def import_blocks(self, block_ids: Seq[int], blocks: Tensor) -> None:
        """Overwrite these blocks with `blocks`, laid out as `export_blocks` does."""
        index = index_of(block_ids, self.device)
        rows = blocks.to(self.device).view(self._stored_dtype)  # [n, elements of a block]
        start = 0
        for layer in zip(self.keys, self.values, strict=True):
            for pool in layer:
                end = start + pool[0].numel()
                pool[index] = rows[:, start:end].view(-1, *pool.shape[1:])
                start = end

    def copy_blocks(self, source_ids: Seq[int], block_ids: Seq[int]) -> None:
        """Give each of `block_ids` the contents of its source, in every layer; no block is on both sides."""
        sources, blocks = index_tensor(source_ids, self.device), index_tensor(block_ids, self.device)
        for pool in (*self.keys, *self.values):
            pool.index_copy_(0, blocks, pool.index_select(0, sources))


def block_bytes(shapes: Seq[LayerShape], block_size: int, dtype: torch.dtype, *, is_quantized: bool = False) -> int:
    """Bytes one block takes in all layers together."""
    if is_quantized:
        return sum(shape.num_elements + 2 * shape.num_kv_heads * UNIT_BYTES for shape in shapes) * block_size
    return sum(shape.num_elements for shape in shapes) * block_size * dtype.itemsize


def pool_size(config: CacheConfig, bytes_per_block: int) -> int:
    """Number of blocks the configuration pays for; `num_blocks` wins over `memory_bytes`."""
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    else:
        assert config.memory_bytes is not None, "CacheConfig guarantees one of the two"
        num_blocks = config.memory_bytes // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"the KV pool of {config.memory_bytes} bytes holds no block: one takes {bytes_per_block} bytes; "
            "raise cache.memory_gib or lower cache.block_size"
        )
    return num_blocks

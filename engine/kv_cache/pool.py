"""The physical KV pool: per layer one tensor of keys and one of values, cut into N blocks of P tokens.

It does not know a block's owner: `engine.kv_cache.block_manager` does. `engine.attention.torch_attention` reads and
writes it.

    slot:    0    1  ...  P-1 |  P  ...
           +---------------------------+
    keys   |      block 0      | block 1 ...     [N, P, H, D] per layer; slot s is row s % P of block s // P
           +---------------------------+

Each rank of a sharded model stores its own heads, and other engines see all heads (`ShardedKVLayout`). In families
whose attention is not sharded every rank has all heads, so one rank's block is the whole block.

    a block of rank r, one layer     keys [P, H / ranks, D], values [P, H / ranks, D]
    the block as exported            keys [P, H, D], values [P, H, D]: the same bytes as without ranks

A token's head of D numbers is stored in the model's dtype, or in one byte each:

    auto   [ D x the model's dtype ]
    int8   [ D x int8 | bfloat16 scale]  66 bytes for D = 64, against 128 in bfloat16; read by attention on processors
    fp8    [ D x float8_e4m3fn ]         +-448, 3 bits of mantissa, no scale; read by our Triton kernel

Storage depends on the token alone, never on its batch, so speculation is exact with respect to the pool. Numbers beyond
float8's range become +-448. An int8 head that is not finite gets the scale NaN and reads back as NaN, and float8 keeps
infinity and NaN, so an overflow shows. `engine.attention.backend.check_kv_kind` checks which attention reads which.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from engine.batch.indexing import Index, index_of, index_tensor, runs_triton
from engine.batch.side_stream import arrived
from engine.config import CacheConfig, KVDtype
from engine.kv_cache.state_pool import StatePool, zeros
from protos.errors import ConfigError

SCALE_BYTES = torch.bfloat16.itemsize
_TINY = torch.finfo(torch.bfloat16).tiny  # a scale is never zero


def to_int8_heads(heads: Tensor) -> Tensor:
    """Quantize [..., D] of any float -> [..., D + SCALE_BYTES] int8."""
    scales = (heads.abs().amax(dim=-1, keepdim=True).float() / 127).clamp_(min=_TINY).bfloat16()
    scales = scales.where(scales.isfinite(), torch.nan)
    # The scale is rounded, so the largest number may be 128 times the scale.
    numbers = (heads.float() / scales.float()).round_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8)
    return torch.cat((numbers, scales.view(torch.int8)), dim=-1)


def from_int8_heads(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize [..., D + SCALE_BYTES] int8 -> [..., D] of `dtype`."""
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return stored[..., :-SCALE_BYTES].to(dtype).mul_(scales)


_FLOAT8 = torch.float8_e4m3fn
_LARGEST_FLOAT8 = torch.finfo(_FLOAT8).max


def kv_name(kind: KVDtype, dtype: torch.dtype) -> str:
    """Return the name of a pool for a model that computes in `dtype`. Pools of different names exchange no blocks."""
    return str(dtype) if kind is KVDtype.AUTO else f"{dtype} as {kind}"


def memory_dtype(kind: KVDtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the pool's memory; float8 is kept as bytes, which every device can index."""
    return {KVDtype.INT8: torch.int8, KVDtype.FP8: torch.uint8}.get(kind, dtype)


def head_width(kind: KVDtype, dim: int) -> int:
    """Return how many numbers of `memory_dtype` store a head of `dim`."""
    return dim + SCALE_BYTES if kind is KVDtype.INT8 else dim


def head_bytes(kind: KVDtype, dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a stored head of `dim`."""
    return head_width(kind, dim) * memory_dtype(kind, dtype).itemsize


def stored(kind: KVDtype, heads: Tensor) -> Tensor:
    """Encode heads [..., D] of any float as [..., head_width] of `memory_dtype`."""
    if kind is KVDtype.INT8:
        return to_int8_heads(heads)
    if kind is KVDtype.FP8:
        # Clamped here: some versions of torch cast numbers beyond the range to NaN. Infinity times 0 is NaN.
        clamped = heads.clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).add_(heads, alpha=0)
        return clamped.to(_FLOAT8).view(torch.uint8)
    return heads


def loaded(kind: KVDtype, memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the output of `stored` to heads [..., D] of `dtype`."""
    if kind is KVDtype.INT8:
        return from_int8_heads(memory, dtype)
    return memory.view(_FLOAT8).to(dtype) if kind is KVDtype.FP8 else memory


def kernel_view(kind: KVDtype, memory: Tensor) -> Tensor:
    """View the memory in the dtype that a kernel reads."""
    return memory.view(_FLOAT8) if kind is KVDtype.FP8 else memory


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one token in one layer. Head sizes of keys and values differ in some families.

    With `is_latent` a value is the first numbers of its key, and only keys are stored.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    is_latent: bool = False

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The size of a key, and of a value where values have a pool of their own."""
        return (self.key_dim,) if self.is_latent else (self.key_dim, self.value_dim)

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * sum(self.stored_dims)


class KVCache:
    """The pool's tensors. Fresh memory is zero; a slot keeps its last contents, since freed blocks are not cleared.

    On a processor, memory is allocated page by page as blocks are first written.

    `dtype` is the dtype of keys and values as written and read; `kind` is how they are stored. `keys` and `values` are
    the pool's memory for kernels that read it themselves, L x [N, P, H, D], at `addresses`; values of latents are views
    of their keys, at the same address.

    `states` belong to recurrent layers; None for models without any.

    From `min_view_tokens` on, a run of blocks is faster to read in place than to copy together with others.
    """

    def __init__(
        self,
        shapes: Seq[LayerShape],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kind: KVDtype = KVDtype.AUTO,
        states: StatePool | None = None,
    ) -> None:
        self.states = states
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        largest = max((shape.num_elements for shape in shapes), default=1)
        # Copying more costs more time than another attention call.
        self.min_view_tokens = (1 << 18) // (largest * dtype.itemsize)
        self.kind = kind
        self.max_head_dim = max((dim for shape in shapes for dim in (shape.key_dim, shape.value_dim)), default=0)
        self._memory_dtype = memory_dtype(kind, dtype)
        self._pools: list[list[Tensor]] = []  # L x keys and, if stored, values [N, P, H, head_width of D]
        for shape in shapes:
            widths = [head_width(kind, dim) for dim in shape.stored_dims]
            sizes = [(num_blocks, block_size, shape.num_kv_heads, width) for width in widths]
            self._pools.append([zeros(size, self._memory_dtype, device) for size in sizes])
        # The same memory by slot, [N * P, H, D]. The views are made once: they take 100 us per layer of a small model.
        self._slots = [[pool.flatten(0, 1) for pool in layer] for layer in self._pools]
        self.keys, self.values = ([kernel_view(kind, layer[at]) for layer in self._pools] for at in (0, -1))
        self._latent_dims = {at: shape.value_dim for at, shape in enumerate(shapes) if shape.is_latent}
        for layer, dim in self._latent_dims.items():
            self.values[layer] = self.keys[layer][..., :dim]
        self.addresses = [[pool.data_ptr() for pool in pools] for pools in (self.keys, self.values)]

    def write(self, layer: int, slots: Index, key: Tensor, value: Tensor) -> None:
        """Store the KV of T new tokens, key and value [T, H, D]; `slots` is a slice if they are contiguous."""
        if self.kind is KVDtype.AUTO and not isinstance(slots, slice) and runs_triton(slots):
            # Not at the top: processes without a GPU may have no Triton, and need none.
            from engine.kv_cache.triton_store import store

            keys, values = self._slots[layer]
            store(keys, values, slots, key, value)
            return
        for by_slot, new in zip(self._slots[layer], (key, value), strict=False):  # latents store no values
            new = stored(self.kind, new)
            if isinstance(slots, slice):
                by_slot[slots] = new
            else:
                by_slot.index_copy_(0, slots, new)

    def read_slots(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of some slots, in their order, each [S, H, D]."""
        return self._loaded(layer, [by_slot.index_select(0, slots) for by_slot in self._slots[layer]])

    def read_blocks(self, layer: int, blocks: Index) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some blocks, each [n, P, H, D].

        They are views if the blocks are contiguous and stored unquantised, else copies.
        """
        pools = self._pools[layer]
        return self._loaded(
            layer, [pool[blocks] if isinstance(blocks, slice) else pool.index_select(0, blocks) for pool in pools]
        )

    def _loaded(self, layer: int, memory: Seq[Tensor]) -> tuple[Tensor, Tensor]:
        keys, *values = (loaded(self.kind, heads, self.dtype) for heads in memory)
        return keys, values[0] if values else keys[..., : self._latent_dims[layer]]

    def move(self, from_slots: Seq[int], to_slots: Seq[int]) -> None:
        """Copy the KV of slots to other slots (none twice), in all layers; the two may overlap."""
        source, target = index_tensor(from_slots, self.device), index_tensor(to_slots, self.device)
        for layer in self._slots:
            for by_slot in layer:
                by_slot.index_copy_(0, target, by_slot.index_select(0, source))

    def export_blocks(self, block_ids: Seq[int]) -> Tensor:
        """Return a copy of these blocks on the pool's device, [n, bytes of a block] uint8.

        A row has each layer's keys, then its values if they are stored. No pass may write to these blocks meanwhile.
        """
        index = index_of(block_ids, self.device)
        if not self._pools:
            return torch.empty(len(block_ids), 0, dtype=torch.uint8)
        parts = [pool[index].flatten(1) for pool in chain.from_iterable(self._pools)]
        return torch.cat(parts, dim=1).view(torch.uint8)

    def import_blocks(self, block_ids: Seq[int], blocks: Tensor) -> None:
        """Overwrite these blocks with `blocks`, in the layout of `export_blocks`."""
        if not self._pools:
            return
        index = index_of(block_ids, self.device)
        rows = arrived(blocks, self.device).view(self._memory_dtype)  # [n, elements of a block]
        start = 0
        for pool in chain.from_iterable(self._pools):
            end = start + pool[0].numel()
            pool[index] = rows[:, start:end].view(-1, *pool.shape[1:])
            start = end

    def copy_blocks(self, source_ids: Seq[int], block_ids: Seq[int]) -> None:
        """Copy each source into the block at the same index, in every layer; no block is on both sides."""
        sources, blocks = index_tensor(source_ids, self.device), index_tensor(block_ids, self.device)
        for pool in chain.from_iterable(self._pools):
            pool.index_copy_(0, blocks, pool.index_select(0, sources))


def block_bytes(shapes: Seq[LayerShape], block_size: int, dtype: torch.dtype, kind: KVDtype = KVDtype.AUTO) -> int:
    """Return the bytes of one block in all layers, for a model that computes in `dtype`."""
    heads = ((shape.num_kv_heads, dim) for shape in shapes for dim in shape.stored_dims)
    return sum(num_heads * head_bytes(kind, dim, dtype) for num_heads, dim in heads) * block_size


def pool_size(config: CacheConfig, bytes_per_block: int) -> int:
    """Return the configured number of blocks; `num_blocks` wins over `memory_bytes`."""
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    else:
        assert config.memory_bytes is not None, "CacheConfig guarantees one of the two"
        # Without attention, blocks take no memory.
        num_blocks = config.memory_bytes // bytes_per_block if bytes_per_block else 1 << 16
    if num_blocks < 1:
        raise ConfigError(
            f"the KV pool of {config.memory_bytes} bytes holds no block: one takes {bytes_per_block} bytes; "
            "raise cache.memory_gib or lower cache.block_size"
        )
    return num_blocks


@dataclass(frozen=True, slots=True)
class ShardedKVLayout:
    """Blocks of a model with layers `shapes` (all heads), sharded over `num_ranks` with `rank_shapes`."""

    shapes: Seq[LayerShape]
    rank_shapes: Seq[LayerShape]
    block_size: int
    dtype: torch.dtype  # the model's compute dtype
    num_ranks: int
    kind: KVDtype

    def join(self, parts: Seq[Tensor]) -> Tensor:
        """Return whole blocks `[n, bytes]` uint8 from those each rank exports."""
        by_rank = [self._pools(part, self.rank_shapes) for part in parts]
        columns: list[Tensor] = []
        for is_whole, *pools in zip(self._are_whole, *by_rank, strict=True):
            columns.append(pools[0] if is_whole else torch.cat(pools, dim=2))
        return torch.cat([column.flatten(1) for column in columns], dim=1)

    def of_rank(self, blocks: Tensor, index: int) -> Tensor:
        """Return the part of whole blocks `[n, bytes]` uint8 that rank `index` stores."""
        columns: list[Tensor] = []
        for is_whole, pool in zip(self._are_whole, self._pools(blocks, self.shapes), strict=True):
            columns.append(pool if is_whole else pool.chunk(self.num_ranks, dim=2)[index])
        return torch.cat([column.flatten(1) for column in columns], dim=1)

    @property
    def _are_whole(self) -> list[bool]:
        """True per pool, in the order of export, if every rank has all its heads."""
        pairs = zip(self.shapes, self.rank_shapes, strict=True)
        return [shape == rank_shape for shape, rank_shape in pairs for _ in shape.stored_dims]

    def _pools(self, blocks: Tensor, shapes: Seq[LayerShape]) -> list[Tensor]:
        """Split blocks `[n, bytes]` uint8 of these layers into one `[n, P, H, bytes of a head]` per pool, in order."""
        sizes = [
            (shape.num_kv_heads, head_bytes(self.kind, dim, self.dtype))
            for shape in shapes
            for dim in shape.stored_dims
        ]
        widths = [self.block_size * num_heads * num_bytes for num_heads, num_bytes in sizes]
        parts = blocks.split(widths, dim=1)
        pools = zip(parts, sizes, strict=True)
        return [pool.view(len(blocks), self.block_size, *size) for pool, size in pools]

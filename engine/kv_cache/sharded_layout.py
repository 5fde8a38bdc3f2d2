"""Exported KV blocks of a sharded model: each rank has its own heads, other engines see all heads.

In families whose attention is not sharded every rank has all heads, so one rank's block is the whole block.

a block of rank r, one layer    keys [P, H / ranks, D], values [P, H / ranks, D]
the block as exported            keys [P, H, D], values [P, H, D]: the same bytes as without ranks
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import KVDtype
from engine.kv_cache.kv_dtype import head_bytes
from engine.kv_cache.pool import LayerShape


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
        return [shape == rank_shape for shape, rank_shape in pairs for _ in ("keys", "values")]

    def _pools(self, blocks: Tensor, shapes: Seq[LayerShape]) -> list[Tensor]:
        """Split blocks `[n, bytes]` uint8 of these layers into one `[n, P, H, bytes of a head]` per pool, in order."""
        sizes = [
            (shape.num_kv_heads, head_bytes(self.kind, dim, self.dtype))
            for shape in shapes
            for dim in (shape.key_dim, shape.value_dim)
        ]
        widths = [self.block_size * num_heads * num_bytes for num_heads, num_bytes in sizes]
        parts = blocks.split(widths, dim=1)
        pools = zip(parts, sizes, strict=True)
        return [pool.view(len(blocks), self.block_size, *size) for pool, size in pools]

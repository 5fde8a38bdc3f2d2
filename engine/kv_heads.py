"""Exported KV blocks of a model that is divided among ranks: each has the rows of its own heads, the world sees all.

a block of rank r, one layer    keys [P, H / ranks, D], values [P, H / ranks, D]
the block as it is exported     keys [P, H, D], values [P, H, D]: the same bytes as without ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import LayerShape
from engine.kv_kind import KVKind


@dataclass(frozen=True, slots=True)
class HeadParts:
    """How blocks of a model with these layers (all heads of them) are divided among `num_ranks`."""

    shapes: Seq[LayerShape]
    block_size: int
    dtype: torch.dtype  # that the model computes in
    num_ranks: int
    kind: KVKind

    def join(self, parts: Seq[Tensor]) -> Tensor:
        """Whole blocks `[n, bytes]` uint8 of every rank's, `[n, bytes / num_ranks]` each."""
        columns: list[Tensor] = []
        start = 0
        for width, num_heads in self._pools():
            end = start + width * num_heads * self.block_size // self.num_ranks
            pools = [part[:, start:end].view(len(part), self.block_size, -1, width) for part in parts]
            columns.append(torch.cat(pools, dim=2).flatten(1))
            start = end
        return torch.cat(columns, dim=1)

    def of_rank(self, blocks: Tensor, index: int) -> Tensor:
        """What rank `index` has of whole blocks `[n, bytes]` uint8."""
        columns: list[Tensor] = []
        start = 0
        for width, num_heads in self._pools():
            end = start + width * num_heads * self.block_size
            pool = blocks[:, start:end].view(len(blocks), self.block_size, num_heads, width)
            columns.append(pool.chunk(self.num_ranks, dim=2)[index].flatten(1))
            start = end
        return torch.cat(columns, dim=1)

    def _pools(self) -> Iterator[tuple[int, int]]:
        """Bytes of one head and number of heads of each pool, in the order of export."""
        for shape in self.shapes:
            for dim in (shape.key_dim, shape.value_dim):
                yield self.kind.head_bytes(dim, self.dtype), shape.num_kv_heads

"""What our attention kernels are tested on: spans over a pool of random keys and values, and small models.

The oracle is slow: each row alone, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from engine.attention import LayerOptions
from engine.config import CacheConfig, ModelConfig
from engine.index import index_tensor
from engine.kv_cache import KVCache, LayerShape
from engine.kv_kind import KVKind
from engine.model_runner import ModelRunner
from engine.span import Span
from engine.tiling import Heads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class Extent:
    """A span's shape: tokens before it, its own, and the tree at its end."""

    start: int
    num_rows: int
    parents: tuple[int, ...] = ()


DECODE, VERIFY, CHUNK, FRESH = Extent(37, 1), Extent(20, 5), Extent(9, 19), Extent(0, 3)
MIXED = [DECODE, VERIFY, CHUNK, FRESH]
PLAIN = LayerOptions(scaling=0.3)

BUSHY = (-1, -1, 0, 0, 1, 2, 4, 6)
TREES = [
    Extent(30, 8, BUSHY),  # begins with the span
    Extent(19, 9, BUSHY),  # behind the last committed token
    Extent(14, 5, BUSHY),  # began before the span: its first three nodes are in the pool
    Extent(12, 4),  # no tree
]


class AttentionWorld:
    """Spans whose KV is all written. Blocks of no span hold NaN, and so do slots that no row has written."""

    def __init__(
        self,
        extents: Seq[Extent],
        heads: Heads,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kind: KVKind = KVKind.AUTO,
        seed: int = 0,
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.heads = heads
        sizes = [-(-(extent.start + extent.num_rows) // block_size) for extent in extents]
        shape = LayerShape(heads.num_kv_heads, heads.key_dim, heads.value_dim)
        self.cache = KVCache([shape], sum(sizes) + 2, block_size, dtype=dtype, device=DEVICE, kind=kind)
        if kind is not KVKind.INT8:
            self.cache.keys[0].fill_(float("nan"))
            self.cache.values[0].fill_(float("nan"))
        order = torch.randperm(sum(sizes) + 2, generator=self._generator).tolist()
        self.spans = [
            Span([0] * extent.num_rows, extent.start, order[end - size : end], extent.num_rows, extent.parents)
            for extent, size, end in zip(extents, sizes, accumulate(sizes), strict=True)
        ]
        num_rows = sum(extent.num_rows for extent in extents)
        num_heads = heads.num_kv_heads * heads.group_size
        self.query = self._random(num_rows, num_heads, heads.key_dim).to(dtype)  # [T, H * G, D]
        for span in self.spans:
            key = self._random(span.end, heads.num_kv_heads, heads.key_dim).to(dtype)
            value = self._random(span.end, heads.num_kv_heads, heads.value_dim).to(dtype)
            self.cache.write(0, self.slots(span, 0, span.end), key, value)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(DEVICE)

    def slots(self, span: Span, start: int, end: int) -> Tensor:
        """Slots of the span's places [start, end)."""
        size = self.cache.block_size
        return index_tensor((span.block_table[at // size] * size + at % size for at in range(start, end)), DEVICE)

    def new_kv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slots of all rows, and their keys and values as `AttentionPass.attend` takes them."""
        slots = torch.cat([self.slots(span, span.start, span.end) for span in self.spans])
        key, value = (pool.flatten(0, 1)[slots].transpose(0, 1)[None] for pool in self._pools())
        return slots, key, value

    def _stored(self, slots: Tensor) -> Seq[Tensor]:
        if self.cache.kind is KVKind.INT8:
            return self.cache.read_slots(0, slots)
        return [pool.flatten(0, 1)[slots] for pool in self._pools()]

    def _pools(self) -> tuple[Tensor, Tensor]:
        return self.cache.keys[0], self.cache.values[0]

    def expected(self, options: LayerOptions) -> Tensor:
        """[T, H * G, D of the values] float64, from what is stored in the pool."""
        rows = []
        for span in self.spans:
            slots = self.slots(span, 0, span.end)
            keys, values = (heads.double() for heads in self._stored(slots))  # [S, H, D]
            for row in range(len(span.token_ids)):
                seen = torch.tensor(seen_places(span, row, options.window), device=DEVICE)
                query = self.query[len(rows)].double().unflatten(0, (self.heads.num_kv_heads, -1))  # [H, G, D]
                rows.append(_one_row(query, keys[seen], values[seen], options))
        return torch.stack(rows)


def seen_places(span: Span, row: int, window: int | None) -> list[int]:
    """The places that a row of the span sees: back along its parents, then all before the tree."""
    first = span.tree_start
    place = span.start + row
    places = []
    while place >= first:
        places.append(place)
        parent = span.parents[place - first]
        place = first + parent if parent >= 0 else first - 1
    places += range(place, -1, -1)
    return places if window is None else places[:window]


def logits_by(attention: str, folder: Path, device: str, kv: str = "auto") -> Tensor:
    """Of a model's verification and first chunk in one pass, behind what another pass has written."""
    model = _runner(attention, folder, device, kv)
    model.forward([Span(range(3, 21), 0, [5, 2, 9], 0)])
    return model.forward([Span([7, 8], 18, [5, 2, 9], 2), Span(range(30, 37), 0, [1], 1)])


def check_steps(attention: str, folder: Path, device: str) -> None:
    """Steps that are planned together compute what single passes do."""
    model = _runner(attention, folder, device)
    tables = [[5, 2], [1, 9]]
    model.forward([Span(range(3, 10), 0, table, 0) for table in tables])
    expected = [model.forward([Span([20 + at], 7 + at, table, 1) for table in tables]) for at in range(3)]
    steps = model.plan_steps([Span([0] * 3, 7, table, 3) for table in tables])
    for at, (step, logits) in enumerate(zip(steps, expected, strict=True)):
        step.input_ids.fill_(20 + at)
        torch.testing.assert_close(model.run(step), logits, rtol=0, atol=1e-5)


def _runner(attention: str, folder: Path, device: str, kv: str = "auto") -> ModelRunner:
    model = ModelConfig(str(folder), dtype="float32", device=device, attention=attention)
    return ModelRunner(model, CacheConfig(num_blocks=12, block_size=8, dtype=kv))


def _one_row(query: Tensor, keys: Tensor, values: Tensor, options: LayerOptions) -> Tensor:
    """query [H, G, D] over keys [S, H, D] -> [H * G, D of the values]."""
    scores = torch.einsum("hgd,shd->hgs", query, keys) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.sinks is not None:
        column = options.sinks.double().view(*scores.shape[:2], 1)
        scores = torch.cat((scores, column), dim=-1)
    probs = scores.softmax(dim=-1)[..., : keys.shape[0]]
    return torch.einsum("hgs,shd->hgd", probs, values).flatten(0, 1)

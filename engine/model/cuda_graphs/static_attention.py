"""The Triton kernel's attention for recorded passes: launches of a fixed size whose work lists are refilled.

A launch reads from device memory what each of its programs does, so a recording of it serves any contexts: it has as
many programs as the pass can need at most, and those without work end at once.

Splits of batch-invariant passes have a fixed length, so the pool's tokens bound their number: the longest context
would reserve 70 times as many. Sequences that share most of their prefix can exceed it; their pass has no room.

    tiles    [real work, longest first | 0 0 0 ...]      a tile of no rows reads and writes nothing
    merges   [tiles that were split    | 0 0 0 ...]
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.ancestor_mask import ancestor_masks
from engine.attention.base import LayerOptions
from engine.attention.triton_attention import Launch, RowMasks, heads_of, num_processors, read_layer, split_length
from engine.attention.triton_kernel import MERGE_FIELDS, TILE_FIELDS
from engine.attention.triton_tiles import (
    BATCH_INVARIANT_SPLIT_TOKENS,
    PROGRAMS_PER_PROCESSOR,
    HeadShape,
    Ints,
    RowLayout,
    TilePlan,
    Tiling,
    choose_tiling,
    split_tiles,
    whole_tiles,
)
from engine.batch.indexing import copy_array, copy_into
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache
from engine.model.cuda_graphs.buckets import GraphBucket, max_spans
from engine.model.cuda_graphs.static_batch import StaticAttention

_Key = tuple[int | None, HeadShape]


class _WorkList:
    """Rows of work at the head of a buffer, followed by zeros; only rows that are not yet zero are cleared."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer  # [most rows, fields] int32
        self._steps: Tensor  # [passes, most rows, fields]
        self._num_rows = 0

    def __len__(self) -> int:
        """The most rows."""
        return len(self._buffer)

    def fill(self, rows: Ints) -> None:
        """Replace the rows. Nothing waits for the device."""
        num_sent = max(len(rows), self._num_rows)
        assert num_sent <= len(self._buffer), f"{len(rows)} programs in a launch of {len(self._buffer)}"
        if num_sent:
            filled = np.zeros((num_sent, rows.shape[1]), np.int32)
            filled[: len(rows)] = rows
            copy_array(self._buffer[:num_sent], filled)
        self._num_rows = len(rows)

    def reserve_steps(self, num_steps: int) -> None:
        """Make room for the rows of so many passes at a time."""
        with torch.inference_mode(False):
            self._steps = self._buffer.new_zeros(num_steps, *self._buffer.shape)

    def fill_steps(self, steps: Seq[Ints]) -> None:
        """Keep the rows of each pass, for `take`. Nothing waits for the device."""
        filled = np.zeros((len(steps), *self._buffer.shape), np.int32)
        for kept, rows in zip(filled, steps, strict=True):
            kept[: len(rows)] = rows
        copy_array(self._steps[: len(steps)], filled)
        self._num_rows = len(self._buffer)

    def take(self, step: Tensor) -> None:
        """Replace the rows by the rows of a pass."""
        torch.index_select(self._steps, 0, step, out=self._buffer[None])


class _StaticLaunch(NamedTuple):
    """A launch of a fixed size, and its lists of work."""

    launch: Launch
    tiles: _WorkList
    merges: _WorkList

    def has_room(self, plan: TilePlan) -> bool:
        return len(plan.tiles) <= len(self.tiles) and len(plan.merges) <= len(self.merges)

    def fill(self, plan: TilePlan) -> None:
        self.tiles.fill(plan.tiles)
        self.merges.fill(plan.merges)


class TiledAttention(StaticAttention):
    """All layers of one bucket; layers with the same window and head sizes share a layout.

    The first computation finds the windows and head sizes there are; it must come before any recording, and computes
    nothing of use.
    """

    def __init__(
        self,
        bucket: GraphBucket,
        cache: KVCache,
        block_tables: Tensor,
        max_batch: int,
        *,
        has_trees: bool,
        batch_invariant: tuple[int, int] | None = None,
    ) -> None:
        """`block_tables` [blocks] int32 has room for all spans of any padded pass; buckets share it.

        `batch_invariant`: the longest context of a batch-invariant pass, and the tokens of all its contexts that share
        no prefix (the pool); None if passes are not invariant.
        """
        self._is_batch_invariant = batch_invariant is not None
        self._limits = batch_invariant
        self._max_batch = max_batch
        self._bucket = bucket
        self._cache = cache
        self._has_trees = has_trees
        self._num_spans = max_spans(bucket, max_batch, cache.block_size)
        self._block_tables = block_tables
        self._launches: dict[_Key, _StaticLaunch] = {}

    def fill(self, layout: RowLayout) -> bool:
        plans = [self._plan(launch, layout, window, heads) for (window, heads), launch in self._launches.items()]
        launches = self._launches.values()
        if not all(launch.has_room(plan) for launch, plan in zip(launches, plans, strict=True)):
            return False
        copy_array(self._block_tables[: len(layout.tables)], layout.tables)
        for (key, launch), plan in zip(self._launches.items(), plans, strict=True):
            launch.fill(plan)
            _fill_masks(launch.launch.masks, layout.spans, window=key[0])
        return True

    def reserve_steps(self, num_steps: int) -> None:
        for launch in self._launches.values():
            launch.tiles.reserve_steps(num_steps)
            launch.merges.reserve_steps(num_steps)

    def fill_steps(self, layouts: Seq[RowLayout]) -> bool:
        plans = [
            [self._plan(launch, layout, window, heads) for layout in layouts]
            for (window, heads), launch in self._launches.items()
        ]
        launches = self._launches.values()
        if not all(launch.has_room(plan) for launch, steps in zip(launches, plans, strict=True) for plan in steps):
            return False
        copy_array(self._block_tables[: len(layouts[0].tables)], layouts[0].tables)
        for launch, steps in zip(launches, plans, strict=True):
            launch.tiles.fill_steps([plan.tiles for plan in steps])
            launch.merges.fill_steps([plan.merges for plan in steps])
        return True

    def take(self, step: Tensor) -> None:
        for launch in self._launches.values():
            launch.tiles.take(step)
            launch.merges.take(step)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        self._cache.write(layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        heads = heads_of(query, key, value)
        launch = self._launches.get((options.window, heads))
        if launch is None:
            launch = self._launches[options.window, heads] = self._new_launch(options.window, heads, query.itemsize)
        return read_layer(self._cache, layer, query, launch.launch, options)

    def _new_launch(self, window: int | None, heads: HeadShape, itemsize: int) -> _StaticLaunch:
        tiling = choose_tiling(self._bucket.rows_per_span, heads, itemsize, is_batch_invariant=self._is_batch_invariant)
        # Each span fills its tiles but the last one.
        num_whole = self._num_spans + self._bucket.num_rows * heads.group_size // tiling.block_m
        # All keys are cut into at most so many pieces; each tile adds one where its keys end within a piece, and
        # another where a window makes them begin within one.
        num_pieces = self._max_pieces(num_whole, tiling, window, heads)
        num_tiles = num_pieces + num_whole * (1 if window is None else 2)
        num_merges = min(num_whole, num_pieces) if window is None else num_whole
        num_lanes = min(tiling.block_m, self._bucket.rows_per_span * heads.group_size)
        tiles = self._zeros(num_tiles, TILE_FIELDS.value)
        merges = self._zeros(num_merges, MERGE_FIELDS.value)
        launch = Launch(
            tiling,
            self._block_tables,
            tiles,
            merges,
            num_tiles,
            num_lanes,
            self._new_masks(),
            self._is_batch_invariant,
        )
        return _StaticLaunch(launch, _WorkList(tiles), _WorkList(merges))

    def _max_pieces(self, num_whole: int, tiling: Tiling, window: int | None, heads: HeadShape) -> int:
        """Splits of `num_whole` tiles; a tile covers at most all keys of its span."""
        if self._limits is None:
            return PROGRAMS_PER_PROCESSOR * num_processors(self._cache.device) // heads.num_kv_heads + 1
        rows_per_span, (longest, in_all) = self._bucket.rows_per_span, self._limits
        tiles_per_span = -(-rows_per_span * heads.group_size // tiling.block_m)
        reach = longest if window is None else min(longest, window + rows_per_span + tiling.block_n)
        num_keys = min(num_whole * reach, tiles_per_span * min(self._max_batch * longest, in_all))
        return num_keys // BATCH_INVARIANT_SPLIT_TOKENS

    def _new_masks(self) -> RowMasks | None:
        if not self._has_trees:
            return None
        num_rows = self._bucket.num_rows
        return RowMasks(self._zeros(num_rows, dtype=torch.int64), self._zeros(num_rows))

    def _plan(self, static: _StaticLaunch, layout: RowLayout, window: int | None, heads: HeadShape) -> TilePlan:
        whole = whole_tiles(layout, window, static.launch.tiling, heads.group_size)
        split_tokens = split_length(whole, heads, self._cache, is_batch_invariant=self._is_batch_invariant)
        return split_tiles(whole, split_tokens)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        with torch.inference_mode(False):  # these are written to outside of it too
            return torch.zeros(*shape, dtype=dtype, device=self._cache.device)


def _fill_masks(masks: RowMasks | None, spans: Seq[Span], window: int | None) -> None:
    if masks is not None:
        copy_into(masks.ancestors, [bits for span in spans for bits in ancestor_masks(span, window)])
        copy_into(masks.positions, [position for span in spans for position in span.positions])

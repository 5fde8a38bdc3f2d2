"""Cuts the attention of a forward batch into programs of equal work for `engine.attention.triton_kernel`.

    a span, G = 4, BLOCK_M = 16            tile 0            tile 1
    packed rows, by token             0 0 0 0 1 .. 3 | 4 4 4 4 5 5 5 5      every query head of a token in turn

    keys that a tile sees            |-- split 0 --|-- split 1 --|- 2 -|    one program per split and kv head

The host makes the cut from numbers that it has, so nothing waits for the device. Splits end at multiples of their
length, so other spans of the pass affect the grouping of a row's keys by that length alone.

Sizes of tiles and splits are read from the head sizes, the pass and the device, never tried out: that would wait for
the device, and would let two replicas choose differently. A pass's spans are laid out as arrays once (`RowLayout`), and
every list of the pass is derived from them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine.batch.span import Span

Ints = NDArray[np.int64]


class SpanField(IntEnum):
    """Columns of `RowLayout.columns`; places count from the start of the span's sequence."""

    TABLE_OFFSET = 0  # of the span's block table in all spans' concatenated tables
    FIRST_ROW = 1  # of the span in the pass
    NUM_ROWS = 2
    START = 3  # place of the span's first row
    TREE_START = 4  # place of its tree's first node; the span's end without a tree


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The spans of a pass, their numbers, and their block tables end to end, each as long as its span needs."""

    spans: Seq[Span]
    columns: Ints  # [spans, fields of a span]
    tables: NDArray[np.int32]
    block_size: int
    has_trees: bool

    @classmethod
    def of(cls, spans: Seq[Span], block_size: int) -> RowLayout:
        """Lay out `spans` (at least one) in order."""
        num_rows = np.array([len(span.token_ids) for span in spans])
        starts = np.array([span.start for span in spans])
        ends = starts + num_rows
        num_blocks = -(-ends // block_size)
        tables = array("i")
        for span, count in zip(spans, num_blocks.tolist(), strict=True):
            tables.extend(span.block_table[:count])
        has_trees = any(span.parents for span in spans)
        tree_starts = np.array([span.tree_start for span in spans]) if has_trees else ends
        columns = np.array([before(num_blocks), before(num_rows), num_rows, starts, tree_starts])
        return cls(spans, columns.T, np.frombuffer(tables, np.int32), block_size, has_trees)

    def moved(self, spans: Seq[Span]) -> RowLayout:
        """Return the layout of the same chains at the places of `spans`, which end no later."""
        columns = self.columns.copy()
        columns[:, SpanField.START] = [span.start for span in spans]
        columns[:, SpanField.TREE_START] = columns[:, SpanField.START] + columns[:, SpanField.NUM_ROWS]
        return replace(self, spans=spans, columns=columns)

    def of_field(self, field: SpanField) -> Ints:
        """Return a number of each span, [spans]."""
        return self.columns[:, field]

    @property
    def span_of_row(self) -> Ints:
        """Index of each row's span, [T]."""
        return np.repeat(np.arange(len(self.columns)), self.of_field(SpanField.NUM_ROWS))


def before(counts: Ints) -> Ints:
    """Return the sum of the counts before each."""
    return np.cumsum(counts) - counts


_STEP_BYTES = 1 << 15  # of keys and values read at a time; three such steps fit into shared memory
_STAGES = {16: 5, 32: 5, 64: 3}  # steps read ahead, by rows; a stage also holds the block table's entries
_MIN_SPLIT_TOKENS = 256  # a shorter read saves less than its merge costs
PROGRAMS_PER_PROCESSOR = 3  # as many as the shared memory of a Hopper processor has room for
BATCH_INVARIANT_SPLIT_TOKENS = 1024  # of every split where the other rows of a pass must not matter


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The head sizes of one layer."""

    num_kv_heads: int
    group_size: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """BLOCK_M packed rows by BLOCK_N keys at a time.

    `num_warps` and `num_stages` are the compiler's: warps that share a tile, and steps that are read ahead.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiling(num_rows: int, heads: HeadShape, itemsize: int, *, is_batch_invariant: bool = False) -> Tiling:
    """Return the tiling for spans of up to `num_rows` tokens whose queries take `itemsize` bytes per element.

    With `is_batch_invariant` it has the height of one row: instructions of other heights may add in another order.
    """
    width = power_of_two(max(heads.key_dim, heads.value_dim))
    packed_rows = 1 if is_batch_invariant else power_of_two(num_rows * heads.group_size)
    if itemsize > 2:  # float32 goes without matrix units, which would round it, and lives in registers
        return Tiling(16, 16, 4, 2) if packed_rows <= 16 else Tiling(32, 16, 8, 2)
    # Larger tiles of queries would leave too few registers for the sums.
    most_rows = min(128, (1 << 15) // (width * itemsize))
    block_m = max(16, min(packed_rows, most_rows))  # a matrix unit takes 16 rows
    block_n = max(16, min(128, _STEP_BYTES // (2 * width * itemsize)))
    num_warps = 8 if block_m == 128 else 4
    return Tiling(block_m, block_n, num_warps, _STAGES.get(block_m, 2))


def choose_split(num_keys: int, num_kv_heads: int, num_processors: int) -> int:
    """Return the keys per split if all tiles of one kv head read `num_keys`: each processor gets a few programs.

    It is a power of two, so a growing context seldom changes it, and with it the order of sums.
    """
    share = num_keys * num_kv_heads // (PROGRAMS_PER_PROCESSOR * num_processors)
    return max(_MIN_SPLIT_TOKENS, power_of_two(share))


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


class TileField(IntEnum):
    """Columns of a list of tiles, one program each: the columns of the tile's span, and four of its own."""

    TABLE_OFFSET = SpanField.TABLE_OFFSET
    FIRST_ROW = SpanField.FIRST_ROW
    NUM_ROWS = SpanField.NUM_ROWS
    START = SpanField.START
    TREE_START = SpanField.TREE_START
    FIRST_PACKED = 5  # packed row of the span
    BEGIN = 6  # keys [begin, end)
    END = 7
    PARTIAL = 8  # where its sums go when other programs read the tile's other keys; -1: none do


class MergeField(IntEnum):
    """Columns of a list of merges: the tiles whose keys several programs read."""

    FIRST_ROW = 0
    NUM_ROWS = 1
    FIRST_PACKED = 2
    FIRST_PARTIAL = 3
    NUM_PARTIALS = 4


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The programs of one pass, longest first, and the tiles to be merged after them."""

    tiles: Ints  # [W, fields of a tile]
    merges: Ints  # [tiles in splits, fields of a merge]

    @property
    def num_partials(self) -> int:
        return int(self.merges[:, MergeField.NUM_PARTIALS].sum())


def whole_tiles(layout: RowLayout, window: int | None, tiling: Tiling, group_size: int) -> Ints:
    """Put every packed row of a pass into one tile with all keys that any of its rows sees: [W, fields]."""
    num_tiles = -(-layout.of_field(SpanField.NUM_ROWS) * group_size // tiling.block_m)
    span = np.repeat(np.arange(len(num_tiles)), num_tiles)  # of each tile
    tiles = np.zeros((len(span), len(TileField)), np.int64)
    tiles[:, : len(SpanField)] = layout.columns[span]
    first_packed = tiling.block_m * (np.arange(len(span)) - before(num_tiles)[span])
    last_row = np.minimum((first_packed + tiling.block_m - 1) // group_size, tiles[:, TileField.NUM_ROWS] - 1)
    tiles[:, TileField.FIRST_PACKED] = first_packed
    if window is not None:
        begins = tiles[:, TileField.START] + first_packed // group_size - window + 1
        if layout.has_trees:
            # A tree node's depth is less than its place, so its window starts earlier.
            of_trees = np.array([each.first_key(window) if each.parents else -1 for each in layout.spans])[span]
            begins = np.where(of_trees >= 0, of_trees, begins)
        tiles[:, TileField.BEGIN] = np.maximum(begins, 0) // tiling.block_n * tiling.block_n
    tiles[:, TileField.END] = tiles[:, TileField.START] + last_row + 1
    tiles[:, TileField.PARTIAL] = -1
    return tiles


def split_tiles(tiles: Ints, split_tokens: int) -> TilePlan:
    """Cut tiles that read more than `split_tokens` keys."""
    begins, ends = tiles[:, TileField.BEGIN], tiles[:, TileField.END]
    first_splits = begins // split_tokens
    num_splits = -(-ends // split_tokens) - first_splits
    is_split = num_splits > 1
    if not is_split.any():
        return TilePlan(tiles[np.argsort(begins - ends, kind="stable")], np.empty((0, len(MergeField)), np.int64))
    first_partials = before(np.where(is_split, num_splits, 0))
    tile = np.repeat(np.arange(len(tiles)), num_splits)  # of each program
    programs = tiles[tile]
    index = np.arange(len(programs)) - before(num_splits)[tile]
    split = (first_splits[tile] + index) * split_tokens
    programs[:, TileField.BEGIN] = np.maximum(begins[tile], split)
    programs[:, TileField.END] = np.minimum(ends[tile], split + split_tokens)
    programs[:, TileField.PARTIAL] = np.where(is_split[tile], first_partials[tile] + index, -1)
    lengths = programs[:, TileField.END] - programs[:, TileField.BEGIN]
    merged = (TileField.FIRST_ROW, TileField.NUM_ROWS, TileField.FIRST_PACKED)
    merges = np.column_stack([*(tiles[:, field] for field in merged), first_partials, num_splits])[is_split]
    return TilePlan(programs[np.argsort(-lengths, kind="stable")], merges)


def num_keys_of(tiles: Ints) -> int:
    """Count the keys that the tiles read."""
    return int((tiles[:, TileField.END] - tiles[:, TileField.BEGIN]).sum())

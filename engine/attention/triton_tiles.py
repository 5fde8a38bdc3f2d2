"""Cuts the attention of a forward batch into programs of like work for `engine.attention.triton_kernel`.

    a span, G = 4, BLOCK_M = 16            tile 0            tile 1
    packed rows, by token             0 0 0 0 1 .. 3 | 4 4 4 4 5 5 5 5      every query head of a token in turn

    keys that a tile sees            |-- split 0 --|-- split 1 --|- 2 -|    one program per split and kv head

The cut is made on the host, from numbers that the host has: nothing waits for the device. Splits end at multiples of
their length, so how a row's keys are grouped does not depend on the other spans of the pass, but for that length.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine.attention.triton_tiling import Tiling
from engine.span import Span

Ints = NDArray[np.int64]


class TileField(IntEnum):
    """Columns of a list of tiles, the work of one program each; places are those of the span's sequence."""

    TABLE_OFFSET = 0  # of the span's block table among those of all spans, end to end
    FIRST_ROW = 1  # of the span in the pass
    NUM_ROWS = 2  # of the span
    START = 3  # place of the span's first row
    TREE_START = 4  # place of its tree's first node; the span's end where there is none
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


def whole_tiles(spans: Seq[Span], window: int | None, tiling: Tiling, group_size: int, block_size: int) -> Ints:
    """Every packed row of `spans` in one tile, with all of the keys that any of its rows sees: [W, fields].

    A span's block table counts as many blocks as it needs, of `block_size` tokens each.
    """
    num_rows = np.array([len(span.token_ids) for span in spans])
    starts = np.array([span.start for span in spans])
    ends = starts + num_rows
    num_blocks = -(-ends // block_size)
    num_packed = num_rows * group_size
    num_tiles = -(-num_packed // tiling.block_m)
    columns = np.stack(
        [
            _before(num_blocks),
            _before(num_rows),
            num_rows,
            starts,
            [span.tree_start if span.parents else span.end for span in spans],
        ],
        axis=1,
    )
    tiles = np.empty((num_tiles.sum(), len(TileField)), np.int64)
    tiles[:, : TileField.FIRST_PACKED] = np.repeat(columns, num_tiles, axis=0)
    first_packed = tiling.block_m * (np.arange(len(tiles)) - np.repeat(_before(num_tiles), num_tiles))
    last_row = np.minimum((first_packed + tiling.block_m - 1) // group_size, tiles[:, TileField.NUM_ROWS] - 1)
    tiles[:, TileField.FIRST_PACKED] = first_packed
    tiles[:, TileField.BEGIN] = 0
    if window is not None:
        begins = tiles[:, TileField.START] + first_packed // group_size - window + 1
        if any(span.parents for span in spans):
            # A node of a tree stands nearer to the root than its place says.
            of_trees = np.repeat([span.first_key(window) if span.parents else -1 for span in spans], num_tiles)
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
    num_partials = np.where(num_splits > 1, num_splits, 0)
    first_partials = _before(num_partials)
    programs = np.repeat(tiles, num_splits, axis=0)
    index = np.arange(len(programs)) - np.repeat(_before(num_splits), num_splits)
    split = (np.repeat(first_splits, num_splits) + index) * split_tokens
    programs[:, TileField.BEGIN] = np.maximum(programs[:, TileField.BEGIN], split)
    programs[:, TileField.END] = np.minimum(programs[:, TileField.END], split + split_tokens)
    programs[:, TileField.PARTIAL] = np.where(
        np.repeat(num_splits, num_splits) > 1, np.repeat(first_partials, num_splits) + index, -1
    )
    lengths = programs[:, TileField.END] - programs[:, TileField.BEGIN]
    is_split = num_splits > 1
    merged = (TileField.FIRST_ROW, TileField.NUM_ROWS, TileField.FIRST_PACKED)
    merges = np.column_stack([*(tiles[:, field] for field in merged), first_partials, num_splits])[is_split]
    return TilePlan(programs[np.argsort(-lengths, kind="stable")], merges)


def join_tables(spans: Seq[Span], block_size: int) -> NDArray[np.int32]:
    """Return the block tables of all spans end to end, each as long as its span needs."""
    return np.concatenate([np.asarray(span.block_table[: -(-span.end // block_size)], np.int32) for span in spans])


def num_keys_of(tiles: Ints) -> int:
    """Count the keys that the tiles read."""
    return int((tiles[:, TileField.END] - tiles[:, TileField.BEGIN]).sum())


def _before(counts: Ints) -> Ints:
    """Return the sum of the counts before each."""
    return np.cumsum(counts) - counts

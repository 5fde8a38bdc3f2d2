"""Cuts the attention of a forward batch into programs of like work for `engine.attention.triton_kernel`.

    a span, G = 4, BLOCK_M = 16            tile 0            tile 1
    packed rows, by token             0 0 0 0 1 .. 3 | 4 4 4 4 5 5 5 5      every query head of a token in turn

    keys that a tile sees            |-- split 0 --|-- split 1 --|- 2 -|    one program per split and kv head

The cut is made on the host, from numbers that the host has: nothing waits for the device. Splits end at multiples of
their length, so how a row's keys are grouped does not depend on the other spans of the pass, but for that length.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass, replace

from engine.attention.triton_tiling import Tiling
from engine.span import Span


@dataclass(frozen=True, slots=True)
class Tile:
    """Work of one program, in the kernel's order of fields; places are those of the span's sequence."""

    table_offset: int  # of the span's block table among those of all spans, end to end
    first_row: int  # of the span in the pass
    num_rows: int  # of the span
    start: int  # place of the span's first row
    tree_start: int  # place of its tree's first node; the span's end where there is none
    first_packed: int  # packed row of the span
    begin: int  # keys [begin, end)
    end: int
    partial: int = -1  # where its sums go when other programs read the tile's other keys


@dataclass(frozen=True, slots=True)
class Merge:
    """A tile whose keys several programs read, in the kernel's order of fields."""

    first_row: int
    num_rows: int
    first_packed: int
    first_partial: int
    num_partials: int


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The programs of one pass, longest first, and the tiles to be merged after them."""

    tiles: tuple[Tile, ...]
    merges: tuple[Merge, ...]

    @property
    def num_partials(self) -> int:
        return sum(merge.num_partials for merge in self.merges)

    def rows(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """`tiles` and `merges` as the kernels read them."""
        return [astuple(tile) for tile in self.tiles], [astuple(merge) for merge in self.merges]


def whole_tiles(spans: Seq[Span], window: int | None, tiling: Tiling, group_size: int) -> list[Tile]:
    """Every packed row of `spans` in one tile, with all of the keys that any of its rows sees."""
    tiles: list[Tile] = []
    table_offset = first_row = 0
    for span in spans:
        tiles += _tiles_of(span, table_offset, first_row, window, tiling, group_size)
        table_offset += len(span.block_table)
        first_row += len(span.token_ids)
    return tiles


def split_tiles(tiles: Seq[Tile], split_tokens: int) -> TilePlan:
    """Cut tiles that read more than `split_tokens` keys."""
    programs: list[Tile] = []
    merges: list[Merge] = []
    num_partials = 0
    for tile in tiles:
        splits = list(_splits(tile, split_tokens))
        if len(splits) == 1:
            programs.append(tile)
            continue
        programs += [replace(split, partial=num_partials + index) for index, split in enumerate(splits)]
        merges.append(Merge(tile.first_row, tile.num_rows, tile.first_packed, num_partials, len(splits)))
        num_partials += len(splits)
    programs.sort(key=lambda program: program.begin - program.end)
    return TilePlan(tuple(programs), tuple(merges))


def _tiles_of(
    span: Span, table_offset: int, first_row: int, window: int | None, tiling: Tiling, group_size: int
) -> Iterator[Tile]:
    num_rows = len(span.token_ids)
    for first_packed in range(0, num_rows * group_size, tiling.block_m):
        first = first_packed // group_size
        last = min((first_packed + tiling.block_m - 1) // group_size, num_rows - 1)
        begin = 0
        if window is not None:
            # A node of a tree stands nearer to the root than its place says.
            begin = span.first_key(window) if span.parents else max(0, span.start + first - window + 1)
        yield Tile(
            table_offset=table_offset,
            first_row=first_row,
            num_rows=num_rows,
            start=span.start,
            tree_start=span.tree_start,
            first_packed=first_packed,
            begin=begin // tiling.block_n * tiling.block_n,
            end=span.start + last + 1,
        )


def _splits(tile: Tile, split_tokens: int) -> Iterator[Tile]:
    for split in range(tile.begin // split_tokens, -(-tile.end // split_tokens)):
        begin, end = split * split_tokens, (split + 1) * split_tokens
        yield replace(tile, begin=max(tile.begin, begin), end=min(tile.end, end))

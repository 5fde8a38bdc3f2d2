"""The cut of a pass into programs: every row and every key once, in ranges that other spans do not move."""

from __future__ import annotations

from array import array
from collections import Counter
from enum import IntEnum

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention.triton_tiles import Ints, MergeField, RowLayout, TileField, Tiling, split_tiles, whole_tiles
from engine.batch.span import Span

TILING = Tiling(block_m=16, block_n=16, num_warps=4, num_stages=2)


class Work:
    """A row of a list of tiles or merges, its columns by their names in lower case."""

    def __init__(self, fields: type[IntEnum], row: Ints) -> None:
        self.__dict__ = {field.name.lower(): int(row[field]) for field in fields}

    def __getattr__(self, name: str) -> int:
        raise AttributeError(name)


def tiles_of(tiles: Ints) -> list[Work]:
    return [Work(TileField, row) for row in tiles]


def span(start: int, num_rows: int, parents: tuple[int, ...] = ()) -> Span:
    return Span([0] * num_rows, start, [0] * (-(-(start + num_rows) // 16)), 1, parents)


def laid_out(spans: list[Span]) -> RowLayout:
    return RowLayout.of(spans, 16)


SPANS = st.lists(st.builds(span, st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(spans=SPANS, group_size=st.integers(1, 9), window=st.one_of(st.none(), st.integers(1, 100)))
@example(spans=[span(3, 1), span(300, 40), span(0, 1)], group_size=9, window=1)
def test_each_packed_row_is_in_one_tile_whose_keys_hold_all_it_sees(
    spans: list[Span], group_size: int, window: int | None
) -> None:
    covered: Counter[tuple[int, int]] = Counter()
    starts = {}
    first_row = 0
    for one in spans:
        starts[first_row] = one.start
        first_row += len(one.token_ids)
    for tile in tiles_of(whole_tiles(laid_out(spans), window, TILING, group_size)):
        for packed in range(tile.first_packed, min(tile.first_packed + 16, tile.num_rows * group_size)):
            row = packed // group_size
            covered[tile.first_row + row, packed % group_size] += 1
            place = starts[tile.first_row] + row
            assert tile.begin <= max(0, place - window + 1 if window else 0)
            assert tile.end > place
    assert covered == Counter({(row, head): 1 for row in range(first_row) for head in range(group_size)})


@settings(max_examples=60)
@given(spans=SPANS, split_tokens=st.sampled_from([16, 64, 256]), window=st.one_of(st.none(), st.integers(1, 100)))
@example(spans=[span(255, 2), span(256, 1), span(15, 1)], split_tokens=256, window=None)
def test_splits_hold_each_key_of_a_tile_once_and_end_at_multiples_of_their_length(
    spans: list[Span], split_tokens: int, window: int | None
) -> None:
    whole = whole_tiles(laid_out(spans), window, TILING, group_size=4)
    plan = split_tiles(whole, split_tokens)
    programs, tiles = tiles_of(plan.tiles), tiles_of(whole)
    keys: Counter[tuple[int, int, int]] = Counter()
    for program in programs:
        assert 0 < program.end - program.begin <= split_tokens
        assert program.begin // split_tokens == (program.end - 1) // split_tokens
        keys.update((program.first_row, program.first_packed, key) for key in range(program.begin, program.end))
    expected = {(tile.first_row, tile.first_packed, key) for tile in tiles for key in range(tile.begin, tile.end)}
    assert keys == Counter(dict.fromkeys(expected, 1))
    assert sorted(program.partial for program in programs if program.partial >= 0) == list(range(plan.num_partials))


def test_a_merge_names_the_partials_of_its_tile() -> None:
    plan = split_tiles(whole_tiles(laid_out([span(99, 1), span(10, 1), span(40, 5)]), None, TILING, 4), 32)
    tiles = tiles_of(plan.tiles)
    for merge in (Work(MergeField, row) for row in plan.merges):
        partials = range(merge.first_partial, merge.first_partial + merge.num_partials)
        programs = [program for program in tiles if program.partial in partials]
        assert len(programs) == merge.num_partials > 1
        assert {(p.first_row, p.first_packed) for p in programs} == {(merge.first_row, merge.first_packed)}
    assert [program.partial for program in tiles if program.first_row == 1] == [-1]  # ten keys need no split


def test_the_longest_programs_come_first() -> None:
    lengths = [
        tile.end - tile.begin
        for tile in tiles_of(split_tiles(whole_tiles(laid_out([span(10, 1), span(500, 1)]), None, TILING, 1), 64).tiles)
    ]
    assert lengths == sorted(lengths, reverse=True)


def test_how_a_row_is_split_does_not_depend_on_its_neighbours() -> None:
    def ranges(spans: list[Span]) -> set[tuple[int, int]]:
        tiles = tiles_of(split_tiles(whole_tiles(laid_out(spans), None, TILING, 4), 64).tiles)
        return {(tile.begin, tile.end) for tile in tiles if tile.start == 200}

    assert ranges([span(200, 1)]) == ranges([span(17, 3), span(200, 1), span(900, 1)])


def test_a_window_skips_the_keys_that_no_row_of_a_tree_sees() -> None:
    (tile,) = tiles_of(whole_tiles(laid_out([span(200, 3, (-1, -1, -1))]), 20, TILING, 1))
    assert tile.begin == 176  # all nodes are at position 200, and see from 181 on
    assert (tile.tree_start, tile.end) == (200, 203)


def test_a_tile_finds_its_spans_blocks_among_those_that_the_spans_need() -> None:
    """Tables may be longer than their spans need, and are lists or arrays."""
    spans = [Span([0] * 3, 14, [5, 6, 7, 8], 1), Span([0], 40, array("i", range(20, 30)), 1)]
    assert laid_out(spans).tables.tolist() == [5, 6, 20, 21, 22]
    assert [tile.table_offset for tile in tiles_of(whole_tiles(laid_out(spans), None, TILING, 4))] == [0, 2]

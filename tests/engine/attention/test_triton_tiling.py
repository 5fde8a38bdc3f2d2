"""Sizes of tiles and splits: rows padded as little as a matrix unit allows, and work for every processor."""

from __future__ import annotations

import pytest

from engine.attention.triton_tiles import HeadShape, choose_split, choose_tiling

LLAMA = HeadShape(num_kv_heads=8, group_size=4, key_dim=128, value_dim=128)


@pytest.mark.parametrize(("num_rows", "block_m"), [(1, 16), (4, 16), (5, 32), (8, 32), (16, 64), (2048, 128)])
def test_a_tile_is_as_high_as_the_longest_span_needs(num_rows: int, block_m: int) -> None:
    assert choose_tiling(num_rows, LLAMA, itemsize=2).block_m == block_m


@pytest.mark.parametrize(("dim", "block_n"), [(64, 128), (80, 64), (128, 64), (192, 32), (256, 32), (512, 16)])
def test_wide_heads_read_fewer_keys_at_a_time(dim: int, block_n: int) -> None:
    assert choose_tiling(1, HeadShape(8, 4, dim, dim), itemsize=2).block_n == block_n


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [16, 128, 192, 576])
@pytest.mark.parametrize("num_rows", [1, 100])
def test_tiles_are_what_a_matrix_unit_takes(num_rows: int, dim: int, itemsize: int) -> None:
    tiling = choose_tiling(num_rows, HeadShape(1, 8, dim, dim), itemsize)
    assert tiling.block_m >= 16
    assert tiling.block_n >= 16


def test_one_long_sequence_occupies_every_processor() -> None:
    split_tokens = choose_split(32_768, num_kv_heads=8, num_processors=132)
    num_programs = 32_768 // split_tokens * 8
    assert 132 <= num_programs <= 3 * 132


def test_a_full_batch_is_not_split() -> None:
    assert choose_split(128 * 8192, num_kv_heads=8, num_processors=132) >= 8192


def test_short_contexts_are_not_split() -> None:
    assert choose_split(200, num_kv_heads=8, num_processors=132) == 256

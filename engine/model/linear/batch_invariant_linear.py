"""Batch-invariant linear functions: a row's result has the same bits with any number of other rows.

Matrix kernels order their sums by the number of rows. So a row is rounded differently in a pass of one row and in a
pass of forty, and in bfloat16 that changes tokens. Here rows are computed in tiles of a few heights. A trial at start
keeps the heights that all give a row the same bits:

    13 rows, heights 2 4 8        8 rows | 4 rows | 1 row and another one that pads it to 2

The input shapes decide a kernel's order of sums. Two orders often give one number the same bits, so a trial compares
many random numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import islice

import torch
from torch import Tensor

from engine.model.linear.packed_linear import Linear, LinearFactory
from protos.errors import ConfigError

_HEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def batch_invariant_factory(make_linear: LinearFactory, dtype: torch.dtype | None = None) -> LinearFactory:
    """Return `make_linear` with batch-invariant products."""

    def make_batch_invariant(weight: Tensor, bias: Tensor | None) -> Linear:
        return batch_invariant(make_linear(weight, bias), weight.shape[1], dtype or weight.dtype)

    return make_batch_invariant


def batch_invariant(function: Linear, num_inputs: int, dtype: torch.dtype) -> Linear:
    """Make `function` of rows [..., num_inputs] batch-invariant; our own kernels already are.

    Raises:
        ConfigError: a row's result depends on its place among the others, at every height.
    """
    if getattr(function, "is_batch_invariant", False):
        return function
    heights = batch_invariant_heights(function, num_inputs, dtype)

    def compute(x: Tensor) -> Tensor:
        rows = x.reshape(-1, num_inputs)
        tiles = [function(_padded(tile, height))[: len(tile)] for tile, height in _cut(rows, heights)]
        result = torch.cat(tiles) if len(tiles) != 1 else tiles[0]
        return result.view(*x.shape[:-1], result.shape[-1])

    return compute


def batch_invariant_router(
    router: Callable[..., tuple[Tensor, ...]], num_inputs: int, num_experts: int, dtype: torch.dtype
) -> Callable[..., tuple[Tensor, ...]]:
    """Make `router` of rows [..., num_inputs] batch-invariant; it returns tensors [rows, ...].

    Some routers take numbers [num_experts] after the rows. torch has another exp for the numbers that do not fill a
    vector, so the heights leave no such rest.

    Raises:
        ConfigError: as in `batch_invariant`.
    """
    zeros = [torch.zeros(num_experts)] * (len(inspect.signature(router).parameters) - 1)
    heights = batch_invariant_heights(
        lambda rows: torch.cat([result.double() for result in router(rows, *zeros)], dim=-1),
        num_inputs,
        dtype,
        [height for height in _HEIGHTS if height * num_experts % 32 == 0],  # torch computes 32 numbers at a time
    )

    def route(x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        tiles = _cut(x.reshape(-1, num_inputs), heights)
        results = [[each[: len(tile)] for each in router(_padded(tile, height), *more)] for tile, height in tiles]
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

    return route


@torch.inference_mode()
def batch_invariant_heights(
    function: Linear, num_inputs: int, dtype: torch.dtype, heights: Seq[int] = _HEIGHTS
) -> tuple[int, ...]:
    """Return the ascending heights that give rows the same bits as the base height."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(heights[-1], num_inputs, generator=generator).to(dtype)
    # The base height. Passes with fewer rows are common and must not cost much padding.
    base_height = max(8, heights[0])
    expected = torch.cat([function(tile) for tile in torch.split(rows, base_height)])
    num_rows = -(-256 // expected.shape[1])  # that give 256 numbers, or all rows
    found = tuple(height for height in heights if _is_batch_invariant(function, rows, expected, height, num_rows))
    if base_height not in found:
        raise ConfigError(
            "deterministic is true, but a matrix product of this processor gives a row other bits at another place "
            "among the rows; set it to false"
        )
    return found


def _is_batch_invariant(function: Linear, rows: Tensor, expected: Tensor, height: int, num_rows: int) -> bool:
    """True if tiles of `height` have the expected bits, forwards and backwards, in at least `num_rows` rows."""
    tiles = zip(rows.split(height), expected.split(height), strict=True)
    return all(
        torch.equal(function(tile), own) and torch.equal(function(tile.flip(0)), own.flip(0))
        for tile, own in islice(tiles, -(-num_rows // height))
    )


def _cut(rows: Tensor, heights: Seq[int]) -> list[tuple[Tensor, int]]:
    """Cut `rows` into tiles with their heights: the largest full ones, then one for the rest."""
    cut: list[tuple[Tensor, int]] = []
    start = 0
    while start < len(rows) or not cut:
        num_left = len(rows) - start
        height = next((height for height in reversed(heights) if height <= num_left), heights[0])
        padded = next((each for each in heights if each >= num_left), height)
        height = padded if padded < 2 * height else height  # 7 rows: one tile of 8, not tiles of 4, 2 and 1
        cut.append((rows[start : start + height], height))
        start += height
    return cut


def _padded(tile: Tensor, height: int) -> Tensor:
    num_missing = height - len(tile)
    return torch.cat((tile, tile.new_zeros(num_missing, tile.shape[1]))) if num_missing else tile

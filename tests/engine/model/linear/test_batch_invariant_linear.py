"""Rows are computed only in heights that give them the bits of the others, whatever the kernel does in the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.linear.batch_invariant_linear import batch_invariant, batch_invariant_factory, batch_invariant_heights
from engine.model.linear.packed_linear import linear_of
from protos.errors import ConfigError

WIDTH = 6


class HeightDependent:
    """Adds a little to every row in calls of some heights, and remembers all heights it was called with."""

    def __init__(self, wrong_heights: set[int]) -> None:
        self._wrong_heights = wrong_heights
        self.heights: list[int] = []

    def __call__(self, rows: Tensor) -> Tensor:
        self.heights.append(len(rows))
        return rows * 2 + (2**-8 if len(rows) in self._wrong_heights else 0)


def test_heights_that_change_a_bit_are_left_out() -> None:
    assert batch_invariant_heights(HeightDependent({1, 4, 128}), WIDTH, torch.float32) == (2, 8, 16, 32, 64)


def test_a_height_that_changes_few_bits_is_left_out_of_a_function_of_one_output() -> None:
    def function(rows: Tensor) -> Tensor:
        is_changed = (rows[:, :1] > 1.0) & (len(rows) == 1)  # one row in six
        return rows.sum(dim=-1, keepdim=True) + 2**-8 * is_changed

    assert 1 not in batch_invariant_heights(function, WIDTH, torch.float32)


def test_a_function_whose_rows_depend_on_their_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="deterministic is true"):
        batch_invariant_heights(lambda rows: rows + torch.arange(len(rows))[:, None], WIDTH, torch.float32)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 8, 13, 64, 127, 128, 129, 300])
def test_every_row_is_computed_in_a_height_that_was_tried(num_rows: int) -> None:
    function = HeightDependent({1, 3, 7, 13, 128, 129, 300})
    compute = batch_invariant(function, WIDTH, torch.float32)
    tried = set(function.heights)
    function.heights.clear()
    rows = torch.randn(2, num_rows, WIDTH)
    assert torch.equal(compute(rows), rows * 2)
    assert set(function.heights) <= tried - {1, 128}
    assert sum(function.heights) <= 2 * (2 * num_rows) + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_inputs", [96, 4096])
def test_a_row_of_a_product_has_the_same_bits_among_any_others(dtype: torch.dtype, num_inputs: int) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(128, num_inputs).to(dtype), torch.randn(200, num_inputs).to(dtype)
    multiply = batch_invariant_factory(linear_of)(weight, torch.randn(128).to(dtype))
    expected = multiply(rows)
    for start, end in ((0, 1), (7, 12), (3, 36), (60, 200)):
        assert torch.equal(multiply(rows[start:end]), expected[start:end])

"""Our own products by int8 and int4 weights are those of the numbers they keep, and rows do not feel each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.linear.native_quantized import NativeQuantizedProduct
from tests.engine.fixtures.native_kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("instructions")]

ROWS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 65, 127, 128, 129, 300)
SHAPES = (
    (32, 64),
    (64, 448),
    (96, 1024),
    (320, 1088),
    (1024, 2112),
)  # outputs, inputs; the kernel takes 1,024 at a time


def _rounded(x: Tensor) -> Tensor:
    """What the kernel makes of bfloat16 rows: whole numbers in units of their own."""
    units = (x.float().abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30)
    return (x.float() * (1 / units)).round().clamp(-127, 127).double() * units.double()


def _int8(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(-127, 128, shape, generator=generator)
    return numbers, torch.rand(1, shape[0], generator=generator) / 127


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_int8_product_is_that_of_its_numbers(shape: tuple[int, int], has_bias: bool) -> None:
    numbers, scales = _int8(shape)
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None
    multiply = NativeQuantizedProduct(numbers, scales, None, bias)
    weight = numbers.double() * scales.T.double()
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).bfloat16()
        expected = _rounded(x) @ weight.T if num_rows else x.new_zeros(0, shape[0]).double()
        if bias is not None:
            expected += bias.double()
        torch.testing.assert_close(multiply(x).double(), expected, rtol=2**-8 * 1.01, atol=1e-4)


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("num_inputs", [384, 1536])
def test_an_int4_product_is_that_of_its_levels(group_size: int, num_inputs: int) -> None:
    num_outputs = 96
    levels = torch.randint(0, 16, (num_outputs, num_inputs))
    scales, bases = torch.rand(2, num_inputs // group_size, num_outputs) / 16
    bases -= 8 * scales
    weight = levels * scales.T.repeat_interleave(group_size, 1) + bases.T.repeat_interleave(group_size, 1)
    bias = torch.randn(num_outputs)
    multiply = NativeQuantizedProduct(levels, scales, bases, bias)
    for num_rows in ROWS[1:]:
        x = torch.randn(num_rows, num_inputs).bfloat16()
        expected = _rounded(x) @ weight.double().T + bias.double()
        torch.testing.assert_close(multiply(x).double(), expected, rtol=2**-8 * 1.01, atol=1e-3)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_a_row_has_the_same_bits_in_any_company(num_bits: int) -> None:
    numbers, scales = _int8((320, 1088))
    bases = None if num_bits == 8 else torch.randn(17, 320)
    tables = scales if num_bits == 8 else torch.rand(17, 320)
    multiply = NativeQuantizedProduct(numbers if num_bits == 8 else numbers.abs() % 16, tables, bases, None)
    rows = torch.randn(300, 1088).bfloat16()
    together = multiply(rows)
    for num_rows in ROWS[1:]:
        assert torch.equal(multiply(rows[:num_rows]), together[:num_rows])
        assert torch.equal(multiply(rows[-num_rows:]), together[-num_rows:])


def test_a_row_of_zeros_and_one_of_huge_numbers_are_right() -> None:
    numbers, scales = _int8((32, 64))
    x = torch.zeros(3, 64).bfloat16()
    x[1, 5], x[2, 7] = 3e38, 1e-38
    result = NativeQuantizedProduct(numbers, scales, None, None)(x).float()
    assert torch.equal(result[0], torch.zeros(32))
    torch.testing.assert_close(result[1], (numbers[:, 5] * scales[0] * 3e38), rtol=2e-2, atol=0)
    assert torch.isfinite(result[2]).all()


def test_only_whole_groups_of_whole_tiles_fit() -> None:
    fits = NativeQuantizedProduct.fits
    assert fits(torch.zeros(32, 128).bfloat16(), 64)
    assert not fits(torch.zeros(32, 128), 64)
    assert not fits(torch.zeros(32, 96).bfloat16(), 96)
    assert not fits(torch.zeros(32, 128).bfloat16(), 32)
    assert not fits(torch.zeros(32, 384).bfloat16(), 192)
    assert not fits(torch.zeros(48, 128).bfloat16(), 64)


def test_the_result_has_the_dtype_of_the_rows() -> None:
    numbers, scales = _int8((32, 64))
    multiply = NativeQuantizedProduct(numbers, scales, None, None)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(multiply(x.float()), multiply(x).float())
    with pytest.raises(TypeError, match="32"):
        multiply(x[:, :32])

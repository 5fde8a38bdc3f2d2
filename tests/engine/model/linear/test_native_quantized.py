"""Our products by weights of 8, 6 and 4 bits equal products by the dequantized weights; rows are independent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.linear.native_product import Kind
from engine.model.linear.native_quantized import NativeQuantizedProduct, kind_of
from engine.model.linear.rounding import GROUP_SIZE, LONG_GROUP_SIZE, scale_of
from engine.native.library import Instructions, native_instructions, native_library
from tests.engine.fixtures.native_kernels import needs_float_kernels, weights_in_one_stream

pytestmark = [needs_float_kernels, pytest.mark.usefixtures("any_instructions")]

# A product's error: relative by the result's dtype, and absolute by float32 sums per input.
ERROR = {torch.bfloat16: (2**-8 * 1.01, 1e-4), torch.float32: (1e-5, 1e-6)}
DTYPES = list(ERROR)
KINDS = [
    (Kind.INT8, GROUP_SIZE),
    (Kind.INT8, LONG_GROUP_SIZE),
    (Kind.INT6, GROUP_SIZE),
    (Kind.INT4, GROUP_SIZE),
    (Kind.INT4_BASES, GROUP_SIZE),
]  # and inputs that share a scale
RANGES = {Kind.INT8: (-127, 128), Kind.INT6: (-32, 32), Kind.INT4: (0, 16), Kind.INT4_BASES: (0, 16)}

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 24, 25, 31, 33, 48, 65, 127, 128, 129, 300)
SHAPES = (
    (32, 32),
    (50, 96),
    (64, 448),
    (96, 1024),
    (320, 1056),
    (1024, 2112),
)  # outputs, inputs; blocks are of 768 inputs, on AVX2 of 512


def _rounded(x: Tensor, kind: Kind, group_size: int) -> Tensor:
    """The rows as the kernel sees them: whole numbers times a scale for each group of inputs, for 8 bits on a base."""
    groups = x.float().unflatten(-1, (-1, group_size))
    if kind is not Kind.INT8:
        scales = (groups.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-30)
        return ((groups * (1 / scales)).round().clamp(-127, 127).double() * scales.double()).flatten(-2)
    bases, highest = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scales = ((highest - bases) / 255).clamp(min=1e-30)
    levels = ((groups - bases) * (1 / scales)).round().clamp(0, 255).double()
    return (levels * scales.double() + bases.double()).flatten(-2)


def _random(shape: tuple[int, int], kind: Kind, group_size: int = GROUP_SIZE) -> QuantizedWeight:
    """Random numbers [out, in] with tables that the kind holds exactly."""
    generator = torch.Generator().manual_seed(int(kind))
    numbers = torch.randint(*RANGES[kind], shape, generator=generator)
    groups = shape[0], shape[1] // group_size
    scales, bases = torch.rand(2, *groups, generator=generator).half().float() / 16
    if kind is Kind.INT4:
        bytes_of_scales, zeros = torch.randint(0, 256, (2, *groups), generator=generator)
        bytes_of_scales = 90 + bytes_of_scales // 8  # 1/512 to 1/8
        return QuantizedWeight(numbers, scale_of(bytes_of_scales), zeros=zeros / 16, num_bits=4)
    if kind is Kind.INT4_BASES:
        return QuantizedWeight(numbers, scales, (bases - 8 * scales).half().float(), num_bits=4)
    return QuantizedWeight(numbers, scales, num_bits=6 if kind is Kind.INT6 else 8)


def _weight(weight: QuantizedWeight) -> Tensor:
    def spread(table: Tensor | None) -> Tensor | float:
        return 0.0 if table is None else table.double().repeat_interleave(weight.group_size, 1)

    return (weight.numbers.double() - spread(weight.zeros)) * spread(weight.scales) + spread(weight.bases)


def _shapes(group_size: int) -> list[tuple[int, int]]:
    return [shape for shape in SHAPES if shape[1] % group_size == 0]


@pytest.mark.parametrize(
    ("kind", "group_size", "shape"), [(*kind, shape) for kind in KINDS for shape in _shapes(kind[1])]
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows_dtype", DTYPES)
def test_a_product_is_that_of_its_numbers(
    kind: Kind, group_size: int, shape: tuple[int, int], has_bias: bool, rows_dtype: torch.dtype
) -> None:
    quantized = _random(shape, kind, group_size)
    assert kind_of(quantized) is kind
    bias = torch.randn(shape[0]).to(rows_dtype) if has_bias else None
    relative, absolute = ERROR[rows_dtype]
    multiply, weight = NativeQuantizedProduct(quantized, bias), _weight(quantized)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).to(rows_dtype)
        expected = _rounded(x, kind, group_size) @ weight.T
        if bias is not None:
            expected += bias.double()
        torch.testing.assert_close(multiply(x).double(), expected, rtol=relative, atol=absolute * shape[1])


@pytest.mark.parametrize("rows_dtype", DTYPES)
@pytest.mark.parametrize(("kind", "group_size"), KINDS)
def test_a_weight_read_as_one_stream_or_several_gives_the_same_bits(
    kind: Kind, group_size: int, rows_dtype: torch.dtype
) -> None:
    multiply = NativeQuantizedProduct(_random((320, 2112), kind, group_size), None)
    for num_rows in ROWS:
        x = torch.randn(num_rows, 2112).to(rows_dtype)
        with weights_in_one_stream(True):
            one = multiply(x)
        with weights_in_one_stream(False):
            assert torch.equal(multiply(x), one), num_rows


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("kind", "group_size"), KINDS)
def test_a_sum_as_large_as_sums_can_be_is_exact(kind: Kind, group_size: int, sign: int) -> None:
    """AVX2 adds products of bytes in 16 bits, which are full: a sum that does not fit is cut off without a word."""
    ones = torch.ones(32, 128 // group_size)
    greatest = sign * 127 if kind is Kind.INT8 else RANGES[kind][1] - 1
    quantized = QuantizedWeight(
        torch.full((32, 128), greatest),
        ones,
        torch.zeros_like(ones) if kind is Kind.INT4_BASES else None,
        torch.zeros_like(ones) if kind is Kind.INT4 else None,
        num_bits=6 if kind is Kind.INT6 else 8,
    )
    x = torch.ones(7, 128) * sign
    if kind is Kind.INT8:
        x[:, ::group_size] = 0.0  # the base; all others are 255
    expected = _rounded(x, kind, group_size) @ _weight(quantized).T
    product = NativeQuantizedProduct(quantized, None)(x)
    torch.testing.assert_close(product.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
@pytest.mark.parametrize("rows_dtype", DTYPES)
def test_a_huge_input_costs_its_own_group_precision_and_no_other(
    kind: Kind, group_size: int, rows_dtype: torch.dtype
) -> None:
    quantized = _random((64, 256), kind, group_size)
    x = torch.randn(4, 256).to(rows_dtype)
    x[:, 40] = 3e4
    product, exact = NativeQuantizedProduct(quantized, None)(x).double(), x.double() @ _weight(quantized).T
    others = torch.ones(256, dtype=torch.bool)
    others[40 // group_size * group_size :][:group_size] = False
    error = (_rounded(x, kind, group_size) - x.double())[:, others].norm() / x.double()[:, others].norm()
    assert error < 0.01
    torch.testing.assert_close(product, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("rows_dtype", DTYPES)
def test_a_huge_input_of_one_sign_costs_its_group_half_as_much(rows_dtype: torch.dtype) -> None:
    """Rows that meet int8 weights have a base: the sum of such a group's weights is a part of the product."""
    quantized = _random((64, 64), Kind.INT8)
    x = torch.rand(8, 64).to(rows_dtype)
    x[:, 40] = -200.0
    weight = _weight(quantized)
    found = NativeQuantizedProduct(quantized, None)(x).double() - x.double() @ weight.T
    about_zero = (x[:, 32:].double() / (200 / 127)).round() * (200 / 127) - x[:, 32:].double()
    assert found.norm() < 0.6 * (about_zero @ weight[:, 32:].T).norm()


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
@pytest.mark.parametrize("rows_dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(kind: Kind, group_size: int, rows_dtype: torch.dtype) -> None:
    multiply = NativeQuantizedProduct(_random((320, 1088), kind, group_size), None)
    rows = torch.randn(300, 1088).to(rows_dtype)
    together = multiply(rows)
    for num_rows in ROWS[1:]:
        assert torch.equal(multiply(rows[:num_rows]), together[:num_rows])
        assert torch.equal(multiply(rows[-num_rows:]), together[-num_rows:])


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
def test_a_row_has_the_same_bits_on_any_instructions_and_threads(kind: Kind, group_size: int) -> None:
    library, best, num_threads = native_library(Instructions.AVX2), native_instructions(), torch.get_num_threads()
    assert library is not None
    multiply = NativeQuantizedProduct(_random((320, 1088), kind, group_size), None)
    for rows in (torch.randn(1, 1088), torch.randn(140, 1088)):
        found = []
        for instructions, threads in ((Instructions.AVX2, 1), (best, 1), (best, 2)):
            library.outrider_start(instructions)
            torch.set_num_threads(threads)
            found += [multiply(rows), multiply.gated()(rows)]
        torch.set_num_threads(num_threads)
        assert all(torch.equal(*pair) for pair in zip(found, found[2:], strict=False))


@pytest.mark.parametrize("rows_dtype", DTYPES)
def test_a_row_of_zeros_and_one_of_huge_numbers_are_right(rows_dtype: torch.dtype) -> None:
    random = _random((32, 64), Kind.INT8, LONG_GROUP_SIZE)
    quantized = replace(random, scales=(random.scales / 127).half().float())
    x = torch.zeros(3, 64).to(rows_dtype)
    x[1, 5], x[2, 7] = 3e38, 1e-38
    result = NativeQuantizedProduct(quantized, None)(x).float()
    assert torch.equal(result[0], torch.zeros(32))
    expected = _weight(quantized)[:, 5].float() * 3e38
    torch.testing.assert_close(result[1], expected, rtol=2e-2, atol=0)
    assert torch.isfinite(result[2]).all()


def test_only_whole_groups_fit() -> None:
    fits = NativeQuantizedProduct.fits
    assert fits(torch.zeros(32, 96).bfloat16())
    assert fits(torch.zeros(50, 96))
    assert not fits(torch.zeros(32, 80).bfloat16())


def test_the_result_has_the_dtype_of_the_rows() -> None:
    multiply = NativeQuantizedProduct(_random((32, 64), Kind.INT8, LONG_GROUP_SIZE), None)
    x = torch.randn(3, 64).bfloat16()
    assert multiply(x).dtype is torch.bfloat16
    assert torch.equal(multiply(x.float()).bfloat16(), multiply(x))
    assert torch.equal(multiply(x.half()), multiply(x.half().float()).half())
    with pytest.raises(TypeError, match="32"):
        multiply(x[:, :32])

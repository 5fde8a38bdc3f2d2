"""A gate, up and silu in one are the three of them, with weights of any kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from engine.config import Quantization
from engine.model.linear.gated_linear import gated_of
from engine.model.linear.native_product import Gate, NativeGate, NativeProduct
from engine.model.linear.native_quantized import NativeQuantizedProduct
from engine.model.linear.packed_linear import can_pack
from engine.model.linear.quantized_linear import linear_factory
from tests.engine.fixtures.native_kernels import needs_float_kernels

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
FUNCTIONS = {Gate.SILU: F.silu, Gate.RELU_SQUARED: lambda x: F.relu(x).square()}
LARGE = (1200, 1000)  # inputs, outputs: for oneDNN, since ours are made of whole tiles


def _layers(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> tuple[nn.Linear, nn.Linear]:
    """Gate and up, with numbers that bfloat16 has."""
    torch.manual_seed(0)
    gate, up = (nn.Linear(*shape, bias=has_bias, dtype=torch.bfloat16).requires_grad_(False) for _ in range(2))
    return gate.to(dtype), up.to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "function"),
    [(LARGE, torch.bfloat16, Gate.SILU)] + [((64, 96), dtype, each) for dtype in TOLERANCE for each in FUNCTIONS],
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_a_fused_gate_is_the_plain_one(
    shape: tuple[int, int], dtype: torch.dtype, function: Gate, has_bias: bool, num_rows: int
) -> None:
    gate, up = _layers(shape, has_bias, dtype)
    gated = gated_of(gate, up, function=function)
    if gated is None:  # small weights are left to two products where the C kernels are not loaded
        assert shape != LARGE or not can_pack(gate.weight)
        return
    x = torch.randn(num_rows, shape[0]).to(dtype)
    expected = FUNCTIONS[function](gate(x).double()) * up(x).double()
    torch.testing.assert_close(gated(x).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@needs_float_kernels
@pytest.mark.usefixtures("any_instructions")
@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 16, 70, 130])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("rows_dtype", "tolerance"), [(torch.bfloat16, (2e-2, 2e-3)), (torch.float32, (2e-6, 1e-6))])
def test_a_quantized_gate_is_that_of_its_two_products(
    quantization: Quantization,
    has_bias: bool,
    num_rows: int,
    function: Gate,
    rows_dtype: torch.dtype,
    tolerance: tuple[float, float],
) -> None:
    gate, up = _layers((1152, 192), has_bias, rows_dtype)
    gated = gated_of(gate, up, linear_factory(quantization), function)
    assert isinstance(gated, NativeQuantizedProduct)
    x = torch.randn(num_rows, 1152).to(rows_dtype)
    gate_of_x, up_of_x = (linear_factory(quantization)(each.weight, each.bias)(x).float() for each in (gate, up))
    relative, absolute = tolerance
    expected = FUNCTIONS[function](gate_of_x) * up_of_x
    torch.testing.assert_close(gated(x).float(), expected, rtol=relative, atol=absolute)


@needs_float_kernels
@pytest.mark.parametrize("shape", [(33, 48), (96, 40)])
def test_weights_without_whole_tiles_are_left_to_two_products(shape: tuple[int, int]) -> None:
    gate, up = _layers(shape, False, torch.bfloat16)
    assert gated_of(gate, up) is None
    assert gated_of(gate, up, linear_factory(Quantization.INT8)) is None


@needs_float_kernels
def test_a_gate_is_not_fused_where_packing_would_round_either_weight() -> None:
    smooth, also_smooth = _layers((64, 64), False, torch.float32)
    rough = nn.Linear(64, 64, bias=False).requires_grad_(False)
    assert isinstance(gated_of(smooth, also_smooth), NativeGate)
    assert NativeProduct.fits(smooth.weight)
    assert gated_of(smooth, rough) is None
    assert gated_of(rough, smooth) is None

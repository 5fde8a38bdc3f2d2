"""Packed products are compared with the plain ones, and stock layers multiply by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.config import Quantization
from engine.model.linear import weight_store
from engine.model.linear.gated_linear import JoinedGate, gated_of
from engine.model.linear.native_product import NativeProduct
from engine.model.linear.native_quantized import NativeQuantizedProduct
from engine.model.linear.packed_linear import linear_of, plain_factory
from engine.model.linear.quantized_linear import linear_factory
from engine.model.linear.stand_in import halves_of, slices_of, stand_in
from engine.native.library import Instructions, native_library
from protos.errors import ConfigError
from tests.engine.fixtures.native_kernels import needs_float_kernels

ROWS_ERROR = {"rtol": 0.05, "atol": 0.05}


def layers(*num_outputs: int, num_inputs: int = 64) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(num_inputs, each).requires_grad_(False) for each in num_outputs]


def joined(parts: list[nn.Linear]) -> Tensor:
    return torch.cat([each.weight for each in parts])


def test_layers_multiply_by_the_product_that_stands_in_for_them() -> None:
    parts, x = layers(64, 32, 32), torch.randn(3, 64)
    expected = [each(x) for each in parts]
    product = linear_of(joined(parts), torch.cat([each.bias for each in parts]))
    stand_in(dict(zip(parts, slices_of(product, parts), strict=True)), torch.float32, is_exact=True)
    torch.testing.assert_close([each(x) for each in parts], expected)
    assert all(each.weight is None for each in parts)


def test_exchanged_layers_are_refused() -> None:
    first, second, third = layers(32, 32, 64)
    slices = slices_of(linear_of(joined([second, first, third]), None), [first, second, third])
    with pytest.raises(ConfigError, match=r"products that differ from the plain ones by 1\d\d.\d%"):
        stand_in(dict(zip([first, second, third], slices, strict=True)), torch.float32, is_exact=False)


@needs_float_kernels
@pytest.mark.parametrize("quantization", list(Quantization))
def test_the_halves_of_a_gated_product_are_its_gate_and_up(quantization: Quantization) -> None:
    gate, up = layers(64, 64, num_inputs=128)
    if quantization is Quantization.NONE:  # the kernel takes bfloat16 numbers
        gate, up = (each.bfloat16().float() for each in (gate, up))
    x = torch.randn(3, 128)
    gated = gated_of(gate, up, linear_factory(quantization, torch.float32))
    assert gated is not None
    halves = [half(x) for half in halves_of(gated)]
    torch.testing.assert_close(halves, [gate(x), up(x)], rtol=0.1, atol=0.1)
    torch.testing.assert_close(F.silu(halves[0]) * halves[1], gated(x), rtol=1e-4, atol=1e-5)


def test_the_halves_of_a_joined_gate_are_its_outputs_in_order() -> None:
    gate, up = layers(8, 8)
    x = torch.randn(3, 64)
    product = JoinedGate(linear_of(joined([gate, up]), torch.cat([gate.bias, up.bias])))
    torch.testing.assert_close([half(x) for half in halves_of(product)], [gate(x), up(x)])
    torch.testing.assert_close(product(x), F.silu(gate(x)) * up(x))


@needs_float_kernels
@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_a_kernel_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, quantization: Quantization
) -> None:
    compute = NativeQuantizedProduct.__call__
    monkeypatch.setattr(NativeQuantizedProduct, "__call__", lambda self, x: compute(self, x.flip(-1)))
    with pytest.raises(ConfigError, match="set quantization to 'none'"):
        linear_factory(quantization)(torch.randn(64, 64), None)


@needs_float_kernels
@pytest.mark.parametrize("quantization", list(Quantization))
@pytest.mark.parametrize("num_outputs", [32, 96, 200])
def test_a_weight_is_packed_in_parts_as_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, quantization: Quantization, num_outputs: int
) -> None:
    weight, bias, x = torch.randn(num_outputs, 64).bfloat16(), torch.randn(num_outputs), torch.randn(5, 64)
    factory = linear_factory(quantization, torch.float32)
    whole = factory(weight, bias)(x)
    monkeypatch.setattr(weight_store, "_PART_ELEMENTS", 1)
    assert len(weight_store.parts_of(weight)) == -(-num_outputs // weight_store.OUTPUTS)
    assert torch.equal(factory(weight, bias)(x), whole)


@needs_float_kernels
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_a_weight_that_bfloat16_holds_has_our_kernel_in_any_dtype(stored: torch.dtype) -> None:
    weight = torch.randint(-8, 8, (64, 64)).to(stored)
    assert NativeProduct.fits(weight, torch.float32)
    assert NativeProduct.fits(weight, torch.bfloat16) == (native_library(Instructions.AVX512) is not None)
    assert NativeProduct.fits(weight + 2**-6, torch.float32) == (stored == torch.bfloat16)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_may_have_another_dtype_than_the_weight(stored: torch.dtype) -> None:
    weight, bias, x = torch.randn(64, 64).to(stored), torch.randn(64).to(stored), torch.randn(5, 64)
    product = plain_factory(torch.float32)(weight, bias)(x)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, F.linear(x, weight.float(), bias.float()))

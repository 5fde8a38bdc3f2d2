"""`function(gate(x)) * up(x)` in fused products, which apply the function while a result is still in the core."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.batch.indexing import runs_triton
from engine.model.linear.native_product import Gate, NativeGate, NativeProduct, alternating
from engine.model.linear.native_quantized import NativeQuantizedProduct
from engine.model.linear.packed_linear import (
    ROWS_HINT,
    Linear,
    LinearFactory,
    can_reorder,
    keeps_numbers,
    linear_of,
    rows_dtype,
)
from engine.model.linear.weight_store import OUTPUTS, Storable

_MIN_FUSED_ELEMENTS = 1 << 20  # below that oneDNN's second call costs more than it saves


class GatedProduct(Protocol):
    """`function(gate(x)) * up(x)`, of rows [..., in] -> [..., out]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `gate(x)` and `up(x)`, each [..., out]."""


def gated_of(
    gate: nn.Linear, up: nn.Linear, make_linear: LinearFactory = linear_of, function: Gate = Gate.SILU
) -> GatedProduct | None:
    """Return the fused product, or None if nothing is faster than the two products of `make_linear`.

    `gate` and `up` have one shape and dtype, and both a bias [out] or neither.
    """
    if not keeps_numbers(make_linear):
        return _quantized(gate, up, make_linear, function)
    dtype = rows_dtype(make_linear) or gate.weight.dtype
    if NativeProduct.fits(gate.weight, dtype) and NativeProduct.fits(up.weight, dtype):
        return NativeGate(gate.weight, up.weight, gate.bias, up.bias, dtype, function)
    is_large = gate.weight.numel() >= _MIN_FUSED_ELEMENTS
    if function is Gate.SILU and dtype == torch.bfloat16 and can_reorder(gate.weight, dtype) and is_large:
        return _Reordered(gate, up)
    return None


def _quantized(gate: nn.Linear, up: nn.Linear, make_linear: LinearFactory, function: Gate) -> GatedProduct | None:
    """Return one product of our kernel; None if `make_linear` uses another."""
    if gate.out_features % (OUTPUTS // 2) or not NativeQuantizedProduct.fits(gate.weight):
        return None
    bias = None if gate.bias is None else alternating(gate.bias, up.bias)
    product = make_linear(alternating(gate.weight, up.weight), bias)
    return product.gated(function) if isinstance(product, NativeQuantizedProduct) else None


class JoinedGate(Storable):
    """A gate and up as one product, `joined` [..., in] -> [..., gate and up]."""

    def __init__(self, joined: Linear, function: Gate = Gate.SILU) -> None:
        self._joined, self._gate = joined, int(function)

    def __call__(self, x: Tensor) -> Tensor:
        if runs_triton(x) and self._gate == Gate.SILU:
            # Not at the top: processes without a GPU may have no Triton, and need none.
            from engine.model.linear.triton_product import gate_joined

            return gate_joined(self._joined(x))
        gate, up = self.halves(x)
        # In place: fresh memory costs a prefill chunk as much as the product.
        return _activated(gate, self._gate).mul_(up)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self._joined(x).chunk(2, dim=-1)
        return gate, up


def _activated(gate: Tensor, function: int) -> Tensor:
    if function == Gate.RELU_SQUARED:
        return F.relu(gate).square()
    return F.silu(gate) if function == Gate.SILU else F.gelu(gate, approximate="tanh")


class _Reordered:
    """Two calls of oneDNN, for bfloat16 rows."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        weights = (layer.weight.detach().bfloat16().contiguous() for layer in (gate, up))
        self._gate, self._up = (reorder(weight, ROWS_HINT) for weight in weights)
        self._biases = tuple(None if layer.bias is None else layer.bias.bfloat16() for layer in (gate, up))

    def __call__(self, x: Tensor) -> Tensor:
        gate_bias, up_bias = self._biases
        activated = torch.ops.mkldnn._linear_pointwise.default(x, self._gate, gate_bias, "swish", [], "")
        gated: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, activated, self._up, up_bias, "mul")
        return gated

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        multiply = torch.ops.mkldnn._linear_pointwise.default
        gate_bias, up_bias = self._biases
        gate: Tensor = multiply(x, self._gate, gate_bias, "none", [], "")
        up: Tensor = multiply(x, self._up, up_bias, "none", [], "")
        return gate, up

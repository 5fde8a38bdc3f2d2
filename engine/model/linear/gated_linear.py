"""`silu(gate(x)) * up(x)` by products that do the rest themselves, while a result is still in the core."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.linear.native_product import OUTPUTS, NativeGate, NativeProduct, alternating
from engine.model.linear.native_quantized import NativeQuantizedProduct
from engine.model.linear.packed_linear import ROWS_HINT, Linear, LinearFactory, can_reorder, linear_of

_MIN_FUSED_ELEMENTS = 1 << 20  # below that oneDNN's second call costs more than it saves


def gated_of(gate: nn.Linear, up: nn.Linear, make_linear: LinearFactory = linear_of) -> Linear | None:
    """The function of `x` [..., in], or None where there is nothing faster than the two products of `make_linear`.

    `gate` and `up` have one shape and dtype, and both a bias [out] or neither.
    """
    if make_linear is not linear_of:
        return _quantized(gate, up, make_linear)
    if NativeProduct.fits(gate.weight) and NativeProduct.fits(up.weight):
        return NativeGate(gate.weight, up.weight, gate.bias, up.bias)
    if gate.weight.dtype == torch.bfloat16 and can_reorder(gate.weight) and gate.weight.numel() >= _MIN_FUSED_ELEMENTS:
        return _reordered(gate, up)
    return None


def _quantized(gate: nn.Linear, up: nn.Linear, make_linear: LinearFactory) -> Linear | None:
    """One product of our own kernel, where `make_linear` gives that."""
    if gate.out_features % (OUTPUTS // 2) or not NativeQuantizedProduct.fits(gate.weight):
        return None
    bias = None if gate.bias is None else alternating(gate.bias, up.bias)
    product = make_linear(alternating(gate.weight, up.weight), bias)
    return product.gated() if isinstance(product, NativeQuantizedProduct) else None


def _reordered(gate: nn.Linear, up: nn.Linear) -> Linear:
    """Two calls of oneDNN."""
    packed_gate, packed_up = (
        torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), ROWS_HINT) for layer in (gate, up)
    )
    gate_bias, up_bias = gate.bias, up.bias
    activate, multiply = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary

    def compute(x: Tensor) -> Tensor:
        gated: Tensor = multiply(x, activate(x, packed_gate, gate_bias, "swish", [], ""), packed_up, up_bias, "mul")
        return gated

    return compute

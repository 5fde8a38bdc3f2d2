"""Linear layers with int8 or int4 weights: fewer bytes per step where reading the weights is what a step costs.

int8: one scale per output, and every input row is rounded to int8 with a scale of its own (arXiv:2208.07339 without
the outlier columns), so that the product runs on the processor's int8 units. Sums of int8 products are exact whatever
their order: a row's result does not depend on the rows beside it.
int4: one scale and one middle per group of inputs.

Both run on our own kernel on AVX-512 or AMX (`engine.model.linear.native_quantized`), whose rows become int8 for int4
weights too; elsewhere on torch's operators: that of int4 computes in bfloat16, wins for up to four rows and is slow
with many.

The distribution that is served is that of the quantised weights; everything above this file is exact with respect to
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import Quantization
from engine.model.linear.native_quantized import NativeQuantizedProduct
from engine.model.linear.packed_linear import Linear, LinearFactory, linear_of

_GROUP_SIZES = (128, 64, 32)  # inputs per scale of int4: the largest that divides the layer's
_OUTPUTS_PER_TILE = 64  # the int4 operator's
_INNER_TILES = 2  # an argument of the packing that the processor's operator ignores
_TINY = torch.finfo(torch.bfloat16).tiny  # a scale is never zero


def linear_factory(quantization: Quantization) -> LinearFactory:
    """Return the function that packs a weight [out, in] and a bias [out], and gives the one that multiplies by them."""
    return {Quantization.NONE: linear_of, Quantization.INT8: int8_linear, Quantization.INT4: int4_linear}[quantization]


def can_quantize(device: torch.device) -> bool:
    """Whether this build of torch and this device have the operators, and the device the int8 units to gain by them."""
    has_operators = hasattr(torch.ops.onednn, "qlinear_prepack") and torch.backends.mkldnn.is_available()
    has_units = torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cpu" and has_operators and bool(has_units)


def int8_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`F.linear` by an int8 copy of `weight`, which it keeps; the result has the dtype of the input."""
    scales = _int8_scales(weight)  # [out, 1]
    if NativeQuantizedProduct.fits(weight, weight.shape[1]):
        return NativeQuantizedProduct(_to_int8(weight.float(), scales), scales.T, None, bias)
    packed = torch.ops.onednn.qlinear_prepack(_to_int8(weight.float(), scales), None)
    num_outputs = weight.shape[0]
    weight_scales, zero_points = scales.flatten(), torch.zeros(num_outputs, dtype=torch.int64)
    multiply = torch.ops.onednn.qlinear_pointwise.default

    def multiply_int8(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        num_rows = len(rows)
        if num_rows == 1:  # for a single row oneDNN falls back to a kernel that is a hundred times slower
            rows = rows.expand(2, -1)
        row_scales = _int8_scales(rows)  # [T, 1]
        quantized = _to_int8(rows, row_scales)
        product = multiply(
            quantized, 1.0, 0, packed, weight_scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        ).mul_(row_scales)
        if bias is not None:
            product += bias
        return product[:num_rows].to(x.dtype).view(*x.shape[:-1], num_outputs)

    return multiply_int8


def int4_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`F.linear` by an int4 copy of `weight`, which it keeps; a shape the operator lacks is kept as int8."""
    num_outputs, num_inputs = weight.shape
    group_size = next((size for size in _GROUP_SIZES if num_inputs % size == 0), None)
    if group_size is None or num_outputs % _OUTPUTS_PER_TILE:
        return int8_linear(weight, bias)
    levels, table = _int4_levels(weight.float(), group_size)
    if NativeQuantizedProduct.fits(weight, group_size):
        group_scales, middles = table.float().unbind(-1)  # [groups, out]
        return NativeQuantizedProduct(levels, group_scales, middles - 8 * group_scales, bias)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, _INNER_TILES)
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def multiply_int4(x: Tensor) -> Tensor:
        rows = x.reshape(-1, num_inputs).bfloat16()
        product = multiply(rows, packed, group_size, table).to(x.dtype)
        if bias is not None:
            product += bias
        return product.view(*x.shape[:-1], num_outputs)

    return multiply_int4


def _int8_scales(rows: Tensor) -> Tensor:
    """The unit of each row [T, 1] float32: its largest magnitude is 127 of them."""
    return (rows.abs().amax(dim=1, keepdim=True).float() / 127).clamp_(min=_TINY)


def _to_int8(rows: Tensor, scales: Tensor) -> Tensor:
    return (rows / scales).round_().to(torch.int8)


def _int4_levels(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Levels 0 to 15 [out, in] int32, and the table [groups, out, 2] of scale and middle.

    A weight is (level - 8) * scale + middle.
    """
    groups = weight.view(weight.shape[0], -1, group_size)  # [out, groups, group]
    lowest, highest = groups.aminmax(dim=-1)
    scales = ((highest - lowest) / 15).clamp_(min=_TINY).bfloat16()  # [out, groups]
    middles = (lowest + 8 * scales.float()).bfloat16()
    levels = ((groups - middles.float()[..., None]) / scales.float()[..., None] + 8).round_().clamp_(0, 15)
    return levels.to(torch.int32).view_as(weight), torch.stack((scales, middles), dim=-1).transpose(0, 1).contiguous()

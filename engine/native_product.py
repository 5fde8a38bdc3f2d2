"""Products by a bfloat16 weight that is read once, at the speed of memory: `engine/native/products.c`.

A step of few rows is limited by the reading of the weights, which oneDNN does at 0.5 to 0.7 of the rate of this kernel
(docs/performance.md). Every row has the same bits in whatever company it comes, so deterministic models pay nothing.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.native_library import native_library

_UNIT = 32  # inputs of a tile, and outputs of a pair of tiles


class NativeProduct:
    """`F.linear(x, weight, bias)` for a weight that `fits`; it keeps its own copy, packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out, in]."""
        self._num_outputs, self._num_inputs = weight.shape
        self._bias = None if bias is None else bias.detach().float().contiguous()
        plain = weight.detach().bfloat16().contiguous()
        self._packed = torch.empty_like(plain)
        library = _library()
        library.outrider_pack(plain.data_ptr(), self._packed.data_ptr(), self._num_inputs, self._num_outputs)
        is_float32 = weight.dtype == torch.float32
        self._multiply = library.outrider_product_float if is_float32 else library.outrider_product
        self._width = self._num_outputs  # of a row of the result

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether this process has the kernel and it takes such a weight: bfloat16, or float32 that was bfloat16."""
        if weight.ndim != 2 or weight.device.type != "cpu" or weight.numel() == 0:
            return False
        if weight.shape[0] % _UNIT or weight.shape[1] % _UNIT or native_library() is None:
            return False
        is_widened = weight.dtype == torch.float32 and torch.equal(weight.bfloat16().float(), weight)
        return weight.dtype == torch.bfloat16 or is_widened

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._width)
        bias = None if self._bias is None else self._bias.data_ptr()
        sizes = rows.numel() // self._num_inputs, self._num_inputs, self._num_outputs
        self._multiply(rows.data_ptr(), self._packed.data_ptr(), bias, out.data_ptr(), *sizes)
        return out


class NativeGate(NativeProduct):
    """`silu(gate(x)) * up(x)`: both products lie side by side in the packed weight and meet while still in the core."""

    def __init__(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> None:
        """`gate` and `up` [out, in], of one shape, bfloat16."""
        bias = None
        if gate_bias is not None and up_bias is not None:
            bias = _alternating(gate_bias[:, None], up_bias[:, None]).flatten()
        super().__init__(_alternating(gate, up), bias)
        self._multiply = _library().outrider_gated_product
        self._width = gate.shape[0]


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """16 rows of the gate, the same 16 of up, the next 16 of the gate ..."""
    half = _UNIT // 2
    return torch.stack((gate.unflatten(0, (-1, half)), up.unflatten(0, (-1, half))), dim=1).flatten(0, 2)


@cache
def _library() -> ctypes.CDLL:
    library = native_library()
    assert library is not None, "NativeProduct.fits says when there is one"
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.outrider_pack.argtypes = [pointer] * 2 + [size] * 2
    library.outrider_pack.restype = None
    for function in (library.outrider_product, library.outrider_gated_product, library.outrider_product_float):
        function.argtypes = [pointer] * 4 + [size] * 3
        function.restype = None
    return library

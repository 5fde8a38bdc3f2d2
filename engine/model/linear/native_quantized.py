"""Products by int8 and int4 weights at the speed of memory: `engine/native/quantized_products.c`."""

from __future__ import annotations

import copy
import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.model.linear.native_product import has_tiles, tiled
from engine.native.library import native_library

_INPUTS = 64  # of a tile
_BLOCK = 1024  # inputs that the kernel takes at a time: no group lies in two blocks, but one that is all inputs
_PAD = 64  # bytes behind a row of int8, for the kernel


class NativeQuantizedProduct:
    """bfloat16 rows by a weight of int8 numbers or int4 levels; it keeps its own copy, packed.

    A weight is `number * scale + base`. The rows are rounded to int8 too, each in a unit of its own.
    """

    def __init__(self, numbers: Tensor, scales: Tensor, bases: Tensor | None, bias: Tensor | None) -> None:
        """`numbers` [out, in]: int8, or levels 0 to 15 where there are `bases`; `scales` and `bases` [groups, out]."""
        self._num_outputs, self._num_inputs = numbers.shape
        self._num_bits = 8 if bases is None else 4
        self._is_gated = False
        self._packed = tiled(numbers.to(torch.int8), 4)
        if bases is not None:  # the levels of the first tile of a pair below those of the second
            first, second = self._packed.unbind(2)
            self._packed = first | second << 4
        self._scales, self._bases, self._bias = (
            None if table is None else table.detach().float().contiguous() for table in (scales, bases, bias)
        )
        self._group_size = self._num_inputs // len(scales)
        self._num_parts = -(-self._num_inputs // min(self._group_size, _BLOCK))  # that the kernel sums as whole numbers
        self._multiply = _kernel()

    @staticmethod
    def fits(weight: Tensor, group_size: int) -> bool:
        """Whether this process has the kernel and it takes a `weight` of bfloat16 with such groups of inputs."""
        is_whole = group_size == weight.shape[1] or (_BLOCK % group_size == 0 and group_size % _INPUTS == 0)
        return has_tiles(weight, _INPUTS) and weight.dtype == torch.bfloat16 and is_whole

    def gated(self) -> NativeQuantizedProduct:
        """Return `silu(gate) * up`, where the outputs of this one are theirs, `alternating`."""
        gate = copy.copy(self)
        gate._is_gated = True
        return gate

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], of the dtype of `x`. Raises TypeError for rows of another length."""
        if x.shape[-1] != self._num_inputs:
            raise TypeError(f"rows are of {x.shape[-1]} numbers; the weight takes {self._num_inputs}")
        rows = x.bfloat16().contiguous()
        out = rows.new_empty(*x.shape[:-1], self._num_outputs // 2 if self._is_gated else self._num_outputs)
        num_rows = rows.numel() // self._num_inputs
        num_bytes = num_rows * (self._num_inputs + _PAD + 4 * (1 + self._num_parts))
        scratch = torch.empty(num_bytes, dtype=torch.int8, device=x.device)
        self._multiply(
            rows.data_ptr(),
            self._packed.data_ptr(),
            _address(self._bias),
            out.data_ptr(),
            num_rows,
            self._num_inputs,
            self._num_outputs,
            self._num_bits,
            _address(self._scales),
            _address(self._bases),
            self._group_size,
            self._is_gated,
            scratch.data_ptr(),
        )
        return out.to(x.dtype)


def _address(table: Tensor | None) -> int | None:
    return None if table is None else table.data_ptr()


@cache
def _kernel() -> ctypes._FuncPointer:
    library = native_library()
    assert library is not None, "NativeQuantizedProduct.fits says when there is one"
    function = library.outrider_quantized_product
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer] * 4 + [size] * 3 + [ctypes.c_int, pointer, pointer, size, ctypes.c_int, pointer]
    function.restype = None
    return function

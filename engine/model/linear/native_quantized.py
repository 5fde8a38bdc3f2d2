"""Products by int8 and int4 weights at the speed of memory: `engine/native/products/quantized*.c`."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.model.linear.large_pages import empty_in_large_pages
from engine.model.linear.native_product import Gate, PackedWeight, apart, tiled
from engine.model.linear.weight_store import OUTPUTS, Storable
from engine.native.library import Instructions, native_library

GROUP_SIZE = 32  # inputs that share a scale, in weights and rows alike,
LONG_GROUP_SIZE = 64  # or so many of int8: half as many sums to be scaled
_KERNELS = {torch.bfloat16: "outrider_quantized_product", torch.float32: "outrider_quantized_float_product"}


class NativeQuantizedProduct(Storable):
    """Rows of bfloat16 or float32 by a weight of int8 numbers or int4 levels; it keeps its own copy, packed.

    A weight is `number * scale + base`, with a scale and a base for each group of 32 inputs of an output, or with no
    base for 32 or 64. The rows are rounded to 8 bits too, in the same groups, each with a scale of its own and, where
    the weights have none, a base.
    """

    is_batch_invariant: ClassVar = True

    def __init__(self, numbers: Tensor, scales: Tensor, bases: Tensor | None, bias: Tensor | None) -> None:
        """Pack a weight.

        Args:
            numbers: [out, in], -127 to 127, or levels 0 to 15 where there are `bases`.
            scales: [out, groups] of float16 precision, of 32 inputs each; without bases of 32 or 64.
            bases: of the same shape and precision, or None.
            bias: [out].
        """
        self._pack(len(numbers), [packed_part(numbers, scales, bases)], bias)

    @classmethod
    def of_parts(cls, num_outputs: int, parts: Iterable[PackedPart]) -> NativeQuantizedProduct:
        """Join the consecutive parts of a weight of `num_outputs`; all but the last have a multiple of 32 outputs."""
        product = cls.__new__(cls)
        product._pack(num_outputs, parts, None)
        return product

    def _pack(self, num_outputs: int, parts: Iterable[PackedPart], bias: Tensor | None) -> None:
        self._num_outputs, self._gate = num_outputs, int(Gate.NONE)
        self._bias = None if bias is None else _whole_pairs(bias.detach().float())
        num_pairs, pair = -(-num_outputs // OUTPUTS), 0
        for part in parts:
            if pair == 0:
                self._num_inputs, self._num_bits, self._group_size = part.num_inputs, part.num_bits, part.group_size
                self._packed = empty_in_large_pages((num_pairs, *part.numbers.shape[1:]), part.numbers.dtype)
                self._tables = empty_in_large_pages((num_pairs, *part.tables.shape[1:]), part.tables.dtype)
            last = pair + len(part.numbers)
            self._packed[pair:last], self._tables[pair:last] = part.numbers, part.tables
            pair = last

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """True if this process has the kernel and `weight` [out, in] is made of whole groups."""
        is_matrix = weight.ndim == 2 and weight.device.type == "cpu" and weight.numel() > 0
        return is_matrix and weight.shape[1] % GROUP_SIZE == 0 and has_quantized_kernels()

    def with_bias(self, bias: Tensor) -> NativeQuantizedProduct:
        """Return the same product plus `bias` [out]; they share the weight."""
        biased = copy.copy(self)
        biased._bias = _whole_pairs(bias.detach().float())
        return biased

    def gated(self, function: Gate = Gate.SILU) -> NativeQuantizedProduct:
        """Return `function(gate) * up`, where the outputs of this one are theirs, `alternating`."""
        gate = copy.copy(self)
        gate._gate = function
        return gate

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `gate(x)` and `up(x)` of a `gated` product, each [..., out]."""
        plain = copy.copy(self)
        plain._gate = Gate.NONE
        return apart(plain(x))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], of the dtype of `x`. Raises TypeError for rows of another length."""
        if x.shape[-1] != self._num_inputs:
            raise TypeError(f"rows are of {x.shape[-1]} numbers; the weight takes {self._num_inputs}")
        rows = x.contiguous() if x.dtype in _KERNELS else x.float().contiguous()
        width = len(self._packed) * OUTPUTS
        out = rows.new_empty(*x.shape[:-1], width // 2 if self._gate else width)
        num_rows = rows.numel() // self._num_inputs
        scratch = torch.empty(_scratch_size()(num_rows, self._num_inputs), dtype=torch.int8)
        _kernel(rows.dtype)(
            rows.data_ptr(),
            self._packed.data_ptr(),
            self._tables.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            num_rows,
            self._num_inputs,
            width,
            self._num_bits,
            self._group_size,
            self._gate,
            scratch.data_ptr(),
        )
        return (out if width == self._num_outputs else out[..., : self._num_outputs]).to(x.dtype)

    def packed_weight(self, dtype: torch.dtype) -> PackedWeight | None:
        """The weight for a kernel over rows of `dtype`, valid as long as this product; None where it takes others."""
        if dtype not in _KERNELS or self._num_outputs % OUTPUTS:
            return None
        bias = None if self._bias is None else self._bias.data_ptr()
        tensors = self._packed.data_ptr(), self._tables.data_ptr(), bias
        sizes = self._num_inputs, self._num_outputs, self._num_bits, self._group_size
        return PackedWeight(*tensors, *sizes, self._gate)


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Some outputs as the kernel reads them: `numbers` [pair, ...] int8 and `tables` [pair, ...] float16."""

    numbers: Tensor
    tables: Tensor
    num_inputs: int
    num_bits: int
    group_size: int


def packed_part(numbers: Tensor, scales: Tensor, bases: Tensor | None) -> PackedPart:
    """Pack some outputs of a weight; `NativeQuantizedProduct` describes the arguments."""
    group_size = numbers.shape[1] // scales.shape[1]
    packed = tiled(_whole_pairs(numbers).to(torch.int8), 4, group_size // 4)
    if bases is not None:  # the first outputs of a pair in the low bits, the second above
        first, second = packed.unbind(2)
        packed = first | second << 4
    second = _group_sums(numbers, group_size).view(torch.half) if bases is None else bases.detach().half()
    tables = torch.stack([_whole_pairs(table) for table in (scales.detach().half(), second)], dim=-1)
    pairs = tables.view(-1, OUTPUTS, *tables.shape[1:])  # [pair, output, group, table]
    return PackedPart(packed, pairs.permute(0, 2, 3, 1), numbers.shape[1], 8 if bases is None else 4, group_size)


def _group_sums(numbers: Tensor, group_size: int) -> Tensor:
    """The sum of each group's numbers, [out, groups] int16: how often a row's base counts."""
    groups: Tensor = numbers.unflatten(1, (-1, group_size))
    return groups.sum(dim=-1, dtype=torch.int16)


def _whole_pairs(table: Tensor) -> Tensor:
    """A table [out, ...] padded with zeros to the kernel's pairs of 16 outputs."""
    missing = -table.shape[0] % OUTPUTS
    return torch.cat((table, table.new_zeros(missing, *table.shape[1:])))


def has_quantized_kernels() -> bool:
    """True if this process has the kernels: they need AVX2."""
    return native_library(Instructions.AVX2) is not None


@cache
def _kernel(dtype: torch.dtype) -> Any:
    function = getattr(_library(), _KERNELS[dtype])
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer] * 5 + [size] * 3 + [ctypes.c_int] * 3 + [pointer]
    function.restype = None
    return function


@cache
def _scratch_size() -> Any:
    function = _library().outrider_quantized_scratch
    function.argtypes, function.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    return function


def _library() -> ctypes.CDLL:
    library = native_library(Instructions.AVX2)
    assert library is not None, "NativeQuantizedProduct.fits checks that there is one"
    return library

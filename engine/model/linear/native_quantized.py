"""Products by weights of 8, 6 and 4 bits at the speed of memory: `engine/native/products/quantized*.c`."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.linear.native_product import Gate, Kind, NativeProduct, PackedWeight, apart, tiled
from engine.model.linear.rounding import GROUP_SIZE, scale_bytes
from engine.model.linear.weight_store import OUTPUTS, Storable, empty_in_large_pages
from engine.native.library import Instructions, kernel, native_library

_KERNELS = {torch.bfloat16: "quantized_product", torch.float32: "quantized_float_product"}


class NativeQuantizedProduct(Storable):
    """Rows of bfloat16 or float32 by a weight of few bits; it keeps its own copy, packed.

    The rows are rounded to 8 bits, in groups of 32 or 64 inputs like the weight, each with a scale of its own and,
    where the weight has 8 bits, a base.
    """

    is_batch_invariant: ClassVar = True

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """Pack a weight that `kind_of` describes, and a bias [out]."""
        self._pack(len(weight.numbers), [packed_part(weight)], bias)

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
                self._num_inputs, self._kind, self._group_size = part.num_inputs, int(part.kind), part.group_size
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
        scratch = torch.empty(kernel("quantized_scratch", "qq", "q")(num_rows, self._num_inputs), dtype=torch.int8)
        kernel(_KERNELS[rows.dtype], "pppppqqqiiip")(
            rows.data_ptr(),
            self._packed.data_ptr(),
            self._tables.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            num_rows,
            self._num_inputs,
            width,
            self._kind,
            self._group_size,
            self._gate,
            scratch.data_ptr(),
        )
        return (out if width == self._num_outputs else out[..., : self._num_outputs]).to(x.dtype)

    def packed_weight(self, dtype: torch.dtype, *, is_padded: bool = False) -> PackedWeight | None:
        """The weight for a kernel over rows of `dtype`, valid as long as this product; None where it takes others.

        With `is_padded` any number of outputs will do: zeros follow the last one.
        """
        num_outputs = len(self._packed) * OUTPUTS
        if dtype not in _KERNELS or (num_outputs != self._num_outputs and not is_padded):
            return None
        bias = None if self._bias is None else self._bias.data_ptr()
        tensors = self._packed.data_ptr(), self._tables.data_ptr(), bias
        sizes = self._num_inputs, num_outputs, self._kind, self._group_size
        return PackedWeight(*tensors, *sizes, self._gate)


def packed_weight_of(product: object, dtype: torch.dtype, *, is_padded: bool = False) -> PackedWeight | None:
    """Return the weight of a product for a kernel over rows of `dtype`; None where it is no product of our kernels."""
    if isinstance(product, NativeQuantizedProduct):
        return product.packed_weight(dtype, is_padded=is_padded)
    return product.packed_weight(dtype) if isinstance(product, NativeProduct) else None


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Some outputs as the kernel reads them: `numbers` [pair, ...] and `tables` [pair, group, table, output]."""

    numbers: Tensor
    tables: Tensor
    num_inputs: int
    kind: Kind
    group_size: int


def kind_of(weight: QuantizedWeight) -> Kind:
    """Return how a weight is packed: with bases, with zeros, or else by its number of bits.

    Groups have 32 inputs, or 64 of INT8. Scales and bases have float16's precision. With zeros, in sixteenths, a
    scale has a byte (`engine.model.linear.rounding.scale_of`).
    """
    if weight.bases is not None or weight.zeros is not None:
        return Kind.INT4 if weight.bases is None else Kind.INT4_BASES
    return Kind.INT6 if weight.num_bits == 6 else Kind.INT8


def packed_part(weight: QuantizedWeight) -> PackedPart:
    """Pack some outputs of a weight."""
    numbers, kind, group_size = _whole_pairs(weight.numbers), kind_of(weight), weight.group_size
    packed = tiled((numbers + 32 if kind is Kind.INT6 else numbers).to(torch.int8), 4, group_size // 4)
    if kind is not Kind.INT8:  # the first outputs of a pair in the low bits, the second above
        first, second = packed.view(torch.uint8).unbind(2)
        packed = first & 15 | second << 4
        if kind is Kind.INT6:
            packed = torch.cat((packed, _high_bits(first >> 4, second >> 4)), dim=2)
    if kind is Kind.INT4:
        assert weight.zeros is not None
        tables = [scale_bytes(weight.scales), (16 * weight.zeros).to(torch.uint8)]
    else:
        tables = [weight.scales.half()]
    if kind is Kind.INT8:
        tables.append(_group_sums(weight.numbers, group_size).view(torch.half))
    if weight.bases is not None:
        tables.append(weight.bases.half())
    pairs = torch.stack([_whole_pairs(table) for table in tables], dim=-1).unflatten(0, (-1, OUTPUTS))
    return PackedPart(packed, pairs.permute(0, 2, 3, 1), numbers.shape[1], kind, group_size)


def _high_bits(first: Tensor, second: Tensor) -> Tensor:
    """Return the high bits of both outputs of 8 lines in the bytes of 4, as quantized_products.c describes."""
    one, other = slice(0, None, 2), slice(1, None, 2)
    return first[:, :, one] << 4 | second[:, :, one] << 6 | first[:, :, other] << 2 | second[:, :, other]


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

"""Products by a bfloat16 weight that is read once, at the speed of memory: `engine/native/products/*_products.c`.

Reading the weights limits a step of few rows, and oneDNN reads at 0.5 to 0.7 of this kernel's rate
(docs/benchmarks.md). A row's bits do not depend on other rows, so deterministic models use the same kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.linear.weight_store import OUTPUTS, Storable, converted, empty_in_large_pages
from engine.native.library import Instructions, kernel, native_library
from protos.errors import ConfigError

# Of models and products against the stock ones of the same weights; seen: 1e-6, 1e-3, 1e-2.
MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
MAX_ROUNDING_ERROR = 0.5  # of products whose weights are rounded; seen: 0.1. Exchanged weights differ by 1.4


def probe_rows(num_inputs: int) -> Tensor:
    """Return the rows that products are compared on, [2, in] float32."""
    return torch.randn(2, num_inputs, generator=torch.Generator().manual_seed(0))


def check_product(product: Tensor, expected: Tensor, max_error: float) -> None:
    """Raise ConfigError if a product differs from the expected one by more than `max_error` of its norm."""
    product, expected = product.float(), expected.float()
    size = float(expected.norm())
    error = float((product - expected).norm()) / size if size else float(product.norm())
    if not error <= max_error:
        raise ConfigError(
            f"a packed weight of {expected.shape[-1]} outputs gives products that differ from the plain ones by "
            f"{error:.1%} on this processor; set quantization to 'none', and report this"
        )


@torch.inference_mode()
def compare_product(
    function: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, is_exact: bool
) -> None:
    """Compare a function of rows of `dtype` with the product by `weight` [out, in] and `bias` [out].

    `is_exact` is for a function that does not round the weight.

    Raises:
        ConfigError: they differ by more than roundings.
    """
    rows = probe_rows(weight.shape[1]).to(weight.device, dtype)
    product = torch.cat(list(converted(lambda part: F.linear(rows, part.to(dtype)), weight)), dim=-1)
    expected = product if bias is None else product + bias.to(dtype)
    check_product(function(rows), expected, MAX_RELATIVE_ERROR[dtype] if is_exact else MAX_ROUNDING_ERROR)


class Gate(IntEnum):
    """`enum gate` of the kernels: the product is function(gate) * up."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2  # the approximation of gelu by tanh
    GELU = 3  # this and the next are functions of rows alone
    RELU = 4
    RELU_SQUARED = 5
    LOGISTIC = 6
    XIELU = 7  # with two factors
    CLAMPED = 8  # gpt-oss', of experts alone; with two factors


class Kind(IntEnum):
    """`enum kind` of the kernels: the numbers of a weight and their tables."""

    INT8 = 0  # -127 to 127, with a float16 scale and the sum of each group's numbers
    INT6 = 1  # -32 to 31, with a float16 scale
    INT4 = 2  # levels 0 to 15, with a byte for the scale and one for the zero
    INT4_BASES = 3  # levels 0 to 15, with a float16 scale and base
    BFLOAT16 = 4


class PackedWeight(ctypes.Structure):
    """`struct weight` of engine/native/products/weight.h; it refers to the tensors of a product."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "tables", "bias")),
        *((name, ctypes.c_int64) for name in ("num_inputs", "num_outputs", "kind", "group_size", "gate")),
    ]


class NativeProduct(Storable):
    """`F.linear(x, weight, bias)` for a weight that `fits`; it keeps its own copy, packed."""

    is_batch_invariant: ClassVar = True
    _kernels: ClassVar = {torch.bfloat16: "product", torch.float32: "float_product"}
    _arguments: ClassVar = "ppppqqq"
    _gate: int = Gate.NONE

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        """Pack `weight` [out, in] for rows of `dtype`; None for the weight's."""
        self._num_outputs, self._num_inputs = weight.shape
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._width = self._num_outputs  # of a row of the result
        self._packed = _packed(weight.detach())
        self._dtype = dtype or weight.dtype

    @staticmethod
    def fits(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
        """True if this process has the kernel for rows of `dtype` (the weight's if None) and for `weight`.

        bfloat16 rows take any weight, rounded to bfloat16; float32 rows take a weight that bfloat16 holds exactly.
        """
        dtype = dtype or weight.dtype
        if dtype not in NativeProduct._kernels:
            return False
        minimum = Instructions.AVX512 if dtype == torch.bfloat16 else Instructions.AVX2
        is_exact = torch.bfloat16 in (weight.dtype, dtype)
        return has_tiles(weight, minimum) and (is_exact or torch.equal(weight.bfloat16().to(weight.dtype), weight))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]. Raises TypeError for rows of another dtype or length than the weight's."""
        if x.dtype is not self._dtype or x.shape[-1] != self._num_inputs:
            raise TypeError(f"rows are {x.shape[-1]} {x.dtype}; the weight takes {self._num_inputs} {self._dtype}")
        rows = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._width)
        bias = None if self._bias is None else self._bias.data_ptr()
        sizes = rows.numel() // self._num_inputs, self._num_inputs, self._num_outputs, *self._more
        multiply = kernel(self._kernels[self._dtype], self._arguments)
        multiply(rows.data_ptr(), self._packed.data_ptr(), bias, out.data_ptr(), *sizes)
        return out

    @property
    def _more(self) -> tuple[int, ...]:
        """Return the arguments of the kernel that follow the sizes."""
        return ()

    def packed_weight(self, dtype: torch.dtype) -> PackedWeight | None:
        """The weight for a kernel over rows of `dtype`, valid as long as this product; None where it takes others."""
        if dtype is not self._dtype:
            return None
        bias = None if self._bias is None else self._bias.data_ptr()
        sizes = self._num_inputs, self._num_outputs, Kind.BFLOAT16, 0
        return PackedWeight(self._packed.data_ptr(), None, bias, *sizes, self._gate)


class NativeGate(NativeProduct):
    """`function(gate(x)) * up(x)`: both products are next to each other in the packed weight and meet in the core."""

    _kernels: ClassVar = {torch.bfloat16: "gated_product", torch.float32: "gated_float_product"}
    _arguments: ClassVar = "ppppqqqq"

    def __init__(
        self,
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        dtype: torch.dtype | None = None,
        function: Gate = Gate.SILU,
    ) -> None:
        """Pack `gate` and `up` [out, in], of one shape and dtype, for rows of `dtype`; None for the weights'."""
        bias = None
        if gate_bias is not None and up_bias is not None:
            bias = alternating(gate_bias, up_bias)
        super().__init__(alternating(gate, up), bias, dtype)
        self._width, self._gate = gate.shape[0], function

    @property
    def _more(self) -> tuple[int, ...]:
        return (self._gate,)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `gate(x)` and `up(x)`, each [..., out]."""
        plain = NativeProduct.of({**vars(self), "_width": self._num_outputs, "_gate": Gate.NONE})
        return apart(plain(x))


def _packed(weight: Tensor) -> Tensor:
    """Return a weight [out, in] as the kernels read it; a part at a time, so that no whole copy of it is made."""
    packed: Tensor | None = None
    pair = 0
    for part in converted(lambda outputs: tiled(outputs.bfloat16(), 2), weight):
        if packed is None:
            packed = empty_in_large_pages((weight.shape[0] // OUTPUTS, *part.shape[1:]), part.dtype)
        packed[pair : pair + len(part)] = part
        pair += len(part)
    assert packed is not None, "`fits` refuses empty weights"
    return packed


def apart(alternated: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `alternating` in results [..., 2 * out]."""
    halves = alternated.unflatten(-1, (-1, 2, OUTPUTS // 2))
    return halves[..., 0, :].flatten(-2), halves[..., 1, :].flatten(-2)


def has_tiles(weight: Tensor, minimum: Instructions) -> bool:
    """True if this process has the kernels and `weight` [out, in] is made of whole tiles of 32 inputs."""
    if weight.ndim != 2 or weight.device.type != "cpu" or weight.numel() == 0:
        return False
    return weight.shape[0] % OUTPUTS == 0 and weight.shape[1] % 32 == 0 and native_library(minimum) is not None


def tiled(weight: Tensor, num_together: int, num_rows: int = 16) -> Tensor:
    """`weight` [out, in] in the kernels' order: [pair, tile of inputs, half of the pair, row, output, input].

    A tile has `num_rows` rows of `num_together` inputs, those that fill four bytes.
    """
    tiles = weight.unflatten(1, (-1, num_rows, num_together)).unflatten(0, (-1, 2, OUTPUTS // 2))
    words = tiles.contiguous().view(torch.int32)  # [pair, half, output, tile of inputs, row, 1]: fewer numbers to move
    ordered: Tensor = words.permute(0, 3, 1, 4, 2, 5).contiguous()
    return ordered.view(weight.dtype)


def alternating(gate: Tensor, up: Tensor) -> Tensor:
    """16 outputs of the gate, the same 16 of up, the next 16 of the gate ...: [out] or [out, in], twice as long."""
    half = OUTPUTS // 2
    return torch.stack((gate.unflatten(0, (-1, half)), up.unflatten(0, (-1, half))), dim=1).flatten(0, 2)

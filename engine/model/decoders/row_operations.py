"""Norms, residual sums, rotary embeddings and activations: the operations between a layer's products, row by row.

A small model on a processor spends a third of a step there, most of it in the calls themselves: where our kernels
(`engine/native/rows.c`) run, each is one call.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.model.decoders.rotary import rotate
from engine.model.linear.native_product import Gate
from engine.native.library import kernel, kernels_for

_LANES = 16
_FACTORS = (1.0, 1.0)
_KERNELS = {
    "add_norm": "ppppqqffiiiii",
    "norm_heads": "ppqqqqfiiii",
    "rotate": "ppqqqqqii",
    "activate": "pqipi",
    "gate_rows": "ppqqqii",
}


class RowOperations(ABC):
    """The operations of one model; a row's result does not depend on other rows."""

    def __init__(
        self, epsilon: float, scale: float = 1.0, *, centers: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        """`epsilon` is added to the variance in the norms; `scale` multiplies a layer's outputs in the residual stream.

        `centers`: norms over the hidden states subtract the mean. `dtype` belongs to rows next to a residual stream of
        float32; None where both have one.
        """
        self._epsilon, self._scale, self._centers, self._dtype = epsilon, scale, centers, dtype

    @abstractmethod
    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return hidden + scale * delta and its RMS norm times `weight`, [T, hidden] each; `delta` may be overwritten.

        Without a weight both are the sum. A weight [2, hidden] has the bias after it. `hidden` or a weight may be
        float32 for rows of another dtype.
        """

    @abstractmethod
    def norm_heads(self, heads: Tensor, num_normed: int, weight: Tensor) -> Tensor:
        """Return the heads of each row, the first of them normed: at least [T, num_normed, D].

        Args:
            heads: [T, heads, D]; may be overwritten.
            num_normed: how many of them are normed.
            weight: [num_normed, D], or [2, num_normed, D] with biases.
        """

    @abstractmethod
    def rotate(self, heads: Tensor, num_rotated: int, table: Tensor, *, in_pairs: bool = False) -> Tensor:
        """Return the first heads of each row, rotated: [T, num_rotated, D]; `heads` may be overwritten.

        Args:
            heads: [T, heads, D].
            num_rotated: how many of them are queries and keys.
            table: [T, 2, R], rows of a `RotaryTable`; the first R numbers of a head are rotated.
            in_pairs: the table is.
        """

    def gate(self, gates: Tensor, function: Gate, rows: Tensor) -> Tensor:
        """Return `rows` times a function of `gates`, both [T, size]; they may be overwritten."""
        return self.activate(gates, function) * rows

    def activate(self, rows: Tensor, function: Gate, factors: tuple[float, float] = _FACTORS) -> Tensor:
        """Return a function of each number of `rows`, which may be overwritten; `factors` are xIELU's."""
        if function is Gate.XIELU:
            above, below = factors
            negative = (torch.expm1(rows.clamp(max=-1e-6)) - rows) * below
            return torch.where(rows > 0, above * rows * rows, negative) + 0.5 * rows
        if function is Gate.LOGISTIC:
            return torch.sigmoid(rows)
        if function is Gate.SILU:
            return F.silu(rows)
        if function in (Gate.GELU, Gate.GELU_TANH):
            return F.gelu(rows, approximate="tanh" if function is Gate.GELU_TANH else "none")
        return F.relu(rows).square() if function is Gate.RELU_SQUARED else F.relu(rows)

    def norm_projections(self, heads: Tensor, sizes: tuple[int, int], weight: Tensor) -> Tensor:
        """Return the first heads of each row, all `sizes[0]` queries normed together, and then all `sizes[1]` keys.

        Args:
            heads: [T, heads, D].
            sizes: how many heads are queries, and keys.
            weight: [sum of sizes, D].

        Returns:
            [T, sum of sizes, D].
        """
        num_rows, _, dim = heads.shape
        parts = zip(heads[:, : sum(sizes)].split(sizes, 1), weight.split(sizes), strict=True)
        normed = [self.norm_heads(part.flatten(1)[:, None], 1, own.flatten()[None]) for part, own in parts]
        return torch.cat([part.reshape(num_rows, -1, dim) for part in normed], 1)


class TorchRows(RowOperations):
    """The operations by torch, on any device."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        total = hidden if delta is None else torch.add(hidden, delta, alpha=self._scale)
        if weight is None:
            return total, total
        rows, shape = total.to(weight.dtype), weight.shape[-1:]
        dtype = self._dtype or total.dtype
        if weight.ndim == 2:
            return total, F.layer_norm(rows, shape, weight[0], weight[1], eps=self._epsilon).to(dtype)
        norm = F.layer_norm if self._centers else F.rms_norm
        return total, norm(rows, shape, weight, eps=self._epsilon).to(dtype)

    def norm_heads(self, heads: Tensor, num_normed: int, weight: Tensor) -> Tensor:
        rows, shape = heads[:, :num_normed].to(weight.dtype), weight.shape[-1:]
        normed = (F.layer_norm if self._centers else F.rms_norm)(rows, shape, eps=self._epsilon)
        factors, *biases = weight if weight.ndim == 3 else (weight,)
        return sum(biases, normed * factors).to(heads.dtype)

    def rotate(self, heads: Tensor, num_rotated: int, table: Tensor, *, in_pairs: bool = False) -> Tensor:
        return rotate(heads[:, :num_rotated], table, in_pairs=in_pairs)


class NativeRows(RowOperations):
    """The operations by our kernels."""

    def __init__(
        self, epsilon: float, scale: float = 1.0, *, centers: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(epsilon, scale, centers=centers, dtype=dtype)
        self._add_norm, self._norm_heads, self._rotate, self._activate, self._gate = (
            kernel(name, arguments) for name, arguments in _KERNELS.items()
        )

    @staticmethod
    def fit(hidden_size: int, head_dims: tuple[int, int], weights: Tensor) -> bool:
        """True if this process has the kernels and they take rows and heads of such sizes in the dtype of `weights`.

        `head_dims` are all numbers of a head, and those that are rotated.
        """
        has_sizes = hidden_size % _LANES == head_dims[0] % _LANES == head_dims[1] % 2 == 0
        return has_sizes and weights.device.type == "cpu" and kernels_for(weights.dtype) is not None

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        total, added = hidden.contiguous(), None if delta is None else delta.contiguous()
        if added is not None:
            total = hidden.clone(memory_format=torch.contiguous_format)
        dtype = self._dtype or total.dtype
        out = None if weight is None else torch.empty_like(total, dtype=dtype)
        num_rows, size = total.shape
        self._add_norm(
            None if added is None else added.data_ptr(),
            total.data_ptr(),
            None if weight is None else weight.data_ptr(),
            None if out is None else out.data_ptr(),
            num_rows,
            size,
            self._epsilon,
            self._scale,
            self._centers,
            weight is not None and weight.ndim == 2,
            dtype is torch.bfloat16,
            total.dtype is torch.bfloat16,
            weight is not None and weight.dtype is torch.bfloat16,
        )
        return total, total if out is None else out

    def norm_heads(self, heads: Tensor, num_normed: int, weight: Tensor) -> Tensor:
        heads = heads.contiguous()
        num_rows, num_heads, dim = heads.shape
        sizes = num_rows, num_heads * dim, num_normed, dim
        flags = self._centers, weight.ndim == 3, *(each.dtype is torch.bfloat16 for each in (heads, weight))
        self._norm_heads(heads.data_ptr(), weight.data_ptr(), *sizes, self._epsilon, *flags)
        return heads

    def rotate(self, heads: Tensor, num_rotated: int, table: Tensor, *, in_pairs: bool = False) -> Tensor:
        heads = heads.contiguous()
        num_rows, num_heads, dim = heads.shape
        sizes = num_rows, num_heads * dim, num_rotated, dim, table.shape[-1]
        self._rotate(heads.data_ptr(), table.data_ptr(), *sizes, in_pairs, heads.dtype is torch.bfloat16)
        return heads[:, :num_rotated]

    def gate(self, gates: Tensor, function: Gate, rows: Tensor) -> Tensor:
        gates, rows = gates.contiguous(), rows.contiguous()
        num_rows, size = rows.shape
        is_bf16 = rows.dtype is torch.bfloat16
        self._gate(gates.data_ptr(), rows.data_ptr(), num_rows, size, size, function, is_bf16)
        return rows

    def activate(self, rows: Tensor, function: Gate, factors: tuple[float, float] = _FACTORS) -> Tensor:
        rows = rows.contiguous()
        numbers = (ctypes.c_float * len(factors))(*factors)
        self._activate(rows.data_ptr(), rows.numel(), function, numbers, rows.dtype is torch.bfloat16)
        return rows


def row_operations(
    hidden_size: int,
    head_dims: tuple[int, int],
    weights: Tensor,
    epsilon: float,
    scale: float = 1.0,
    *,
    centers: bool = False,
    dtype: torch.dtype | None = None,
) -> RowOperations:
    """Return our kernels where they take rows and heads of such sizes in the dtype of `weights`, else torch's."""
    return (NativeRows if NativeRows.fit(hidden_size, head_dims, weights) else TorchRows)(
        epsilon, scale, centers=centers, dtype=dtype
    )


_EPSILONS = ("variance_epsilon", "eps")  # attributes of norms
_ROUNDINGS = 1e-5  # between two ways to norm a row of float32, relative to its length


def _norm(module: nn.Module, weight: Tensor, rows: NativeRows, hidden_states: Tensor) -> Tensor:
    """Divide rows [..., size] by their root mean square, times `weight` [size] float32.

    The kernel takes rows of float32 and bfloat16; `module` computes others.
    """
    if hidden_states.dtype not in (torch.float32, torch.bfloat16):
        found: Tensor = type(module).forward(module, hidden_states)
        return found
    flat = hidden_states.reshape(-1, len(weight))
    return rows.add_norm(flat, None, weight)[1].view(hidden_states.shape)


@torch.inference_mode()
def use_native_norms(model: nn.Module, dtype: torch.dtype) -> int:
    """Let our kernel compute the norms of `model` that compute as it does, for rows of `dtype`; returns how many.

    Norms have a weight, or 1 + a weight: a random row is normed both ways.
    """
    num_native = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and (norm := _native(module, dtype)) is not None:
            setattr(module, "forward", norm)  # noqa: B010 -- shadows the class's
            num_native += 1
    return num_native


def _native(module: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    weight = getattr(module, "weight", None)
    epsilon = next((float(getattr(module, name)) for name in _EPSILONS if hasattr(module, name)), None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or epsilon is None:
        return None
    if not NativeRows.fit(len(weight), (0, 0), weight.new_empty(0, dtype=dtype)):
        return None
    row = torch.randn(1, len(weight), generator=torch.Generator().manual_seed(0))
    expected = module(row).float()
    for factors in (weight.float(), 1.0 + weight.float()):
        norm = partial(_norm, module, factors.contiguous(), NativeRows(epsilon))
        if float((norm(row) - expected).norm()) <= _ROUNDINGS * float(expected.norm()):
            return norm
    return None

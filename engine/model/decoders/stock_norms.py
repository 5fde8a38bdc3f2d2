"""Norms of transformers' modules by our kernel: one call in place of six operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.model.decoders.row_operations import NativeRows

_EPSILONS = ("variance_epsilon", "eps")  # attributes of norms
_ROUNDINGS = 1e-5  # between two ways to norm a row of float32, relative to its length


class NativeNorm:
    """The forward of a norm: rows [..., size] divided by their root mean square, times a weight."""

    def __init__(self, module: nn.Module, weight: Tensor, epsilon: float) -> None:
        """Compute rows of float32 and bfloat16 by the kernel, others by `module`; `weight` is [size] float32."""
        self._module, self._weight, self._rows = module, weight, NativeRows(epsilon)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype not in (torch.float32, torch.bfloat16):
            found: Tensor = type(self._module).forward(self._module, hidden_states)
            return found
        rows = hidden_states.reshape(-1, len(self._weight))
        return self._rows.add_norm(rows, None, self._weight)[1].view(hidden_states.shape)


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


def _native(module: Any, dtype: torch.dtype) -> NativeNorm | None:
    weight = getattr(module, "weight", None)
    epsilon = next((float(getattr(module, name)) for name in _EPSILONS if hasattr(module, name)), None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or epsilon is None:
        return None
    if not NativeRows.fit(len(weight), (0, 0), weight.new_empty(0, dtype=dtype)):
        return None
    row = torch.randn(1, len(weight), generator=torch.Generator().manual_seed(0))
    expected = module(row).float()
    for factors in (weight.float(), 1.0 + weight.float()):
        norm = NativeNorm(module, factors.contiguous(), epsilon)
        if float((norm(row) - expected).norm()) <= _ROUNDINGS * float(expected.norm()):
            return norm
    return None

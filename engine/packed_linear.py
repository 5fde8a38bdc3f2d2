"""Linear layers whose weight is reordered once for the processor's matrix kernels.

oneDNN reads a reordered bf16 weight at nearly the machine's memory speed, `F.linear` at half of it for a few rows. The
two operators are private to torch: its version is pinned, `is_packing_available` guards them, a test compares them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_ROWS_HINT = 8  # rows the layout is chosen for: decode and verification have 1 to 8, and larger passes lose nothing


def is_packing_available(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor multiply by reordered weights of `dtype`."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """`F.linear(x, weight, bias)` with the weight held in oneDNN's own layout; inference only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(model: nn.Module) -> int:
    """Replace every linear layer of `model` by a packed one, in place; returns how many.

    Each original weight is freed as soon as it is packed unless another module holds it too (a tied embedding), so the
    model needs at most one layer's memory more than before.
    """
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = _pack(child)
            if packed is not None:
                setattr(parent, name, packed)
                num_packed += 1
    return num_packed


def _pack(module: nn.Module) -> PackedLinear | None:
    """The packed twin of a plain linear layer; None for any other, as a subclass may compute something else."""
    if type(module) is nn.Linear and is_packing_available(module.weight.dtype):
        return PackedLinear(module.weight, module.bias)
    if type(module) is Conv1D and is_packing_available(module.weight.dtype):  # GPT-2's linear, stored as [in, out]
        return PackedLinear(module.weight.t(), module.bias)
    return None

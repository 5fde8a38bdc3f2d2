"""Linear layers whose weight is packed once for the processor: for our kernels where they run, else for oneDNN's.

oneDNN reads a reordered bfloat16 weight faster than `F.linear` does for a few rows, and our kernels faster than oneDNN.
Its two operators are private to torch: torch's version is pinned, `can_pack` guards them, and a test compares.

`plain_linears` changes the layers of two families that packing would break or miss: the routers of LongCat-Flash and
the experts of JetMoE.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.pytorch_utils import Conv1D

from engine.model.checkpoint.node_memory import drop_pages
from engine.model.checkpoint.unread_weight import read_weight
from engine.model.linear.native_product import NativeProduct, compare_product
from engine.model.linear.weight_store import NO_STORE, WeightStore

Linear = Callable[[Tensor], Tensor]  # [..., in] -> [..., out]
LinearFactory = Callable[[Tensor, Tensor | None], Linear]  # of weight [out, in] and bias [out]

ROWS_HINT = 8  # rows the layout is chosen for: decode and verification have 1 to 8, and larger passes lose nothing
_MIN_FLOAT32_ELEMENTS = 1 << 20  # smaller float32 weights are as fast in MKL, and a call of oneDNN costs 18 us alone


def can_pack(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """True if a packed `weight` is faster on this processor, for rows of `dtype` (the weight's if None)."""
    return NativeProduct.fits(weight, dtype) or can_reorder(weight, dtype)


def can_reorder(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """True if this build of torch is faster with a weight that oneDNN has reordered."""
    dtype = dtype or weight.dtype
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and weight.numel() >= _MIN_FLOAT32_ELEMENTS


def linear_of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Linear:
    """Return the fastest `F.linear(x, weight, bias)` for rows of `dtype` (the weight's if None); packs a copy."""
    if NativeProduct.fits(weight, dtype):
        return NativeProduct(weight, bias, dtype)
    if dtype is not None:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return torch_linear_of(weight, bias)


def plain_factory(dtype: torch.dtype) -> LinearFactory:
    """Return `linear_of` for rows of `dtype`."""
    return partial(linear_of, dtype=dtype)


def keeps_numbers(make_linear: LinearFactory) -> bool:
    """True if `make_linear` rounds no weight, so that a layer may stay unpacked."""
    return getattr(make_linear, "func", make_linear) is linear_of


def rows_dtype(make_linear: LinearFactory) -> torch.dtype | None:
    """Return the dtype of the rows that `make_linear` is for; None for the weight's."""
    dtype: torch.dtype | None = getattr(make_linear, "keywords", {}).get("dtype")
    return dtype


def torch_linear_of(weight: Tensor, bias: Tensor | None) -> Linear:
    """`linear_of` without our own kernel."""
    if not can_reorder(weight):
        return partial(F.linear, weight=weight, bias=bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def multiply_packed(x: Tensor) -> Tensor:
        product: Tensor = multiply(x, packed, bias, "none", [], "")
        return product

    return multiply_packed


class PackedLinear(nn.Module):
    """A replacement of `nn.Linear` in a stock model that calls a function of rows; inference only."""

    def __init__(self, shape: tuple[int, ...], function: Linear, dtype: torch.dtype) -> None:
        """Stand for a weight of `shape` [out, in] by `function`, which takes rows of `dtype`."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.weight = torch.empty(0, dtype=dtype)  # without numbers: Mamba-2's model asks its head for this dtype
        self.forward = function


def pack_linears(
    model: nn.Module,
    make_linear: LinearFactory = linear_of,
    make_head: LinearFactory | None = None,
    store: WeightStore = NO_STORE,
    prefix: str = "",
) -> int:
    """Pack the linear layers of `model` that get faster, in place, and return their number.

    A `make_linear` that rounds weights packs all layers. `make_head` packs the layer that yields the logits; it
    defaults to `make_linear`. `store` may keep the products, under names that begin with `prefix`.

    A weight is freed once it is packed, unless another module shares it (a tied embedding). So the model needs at most
    one layer's memory more than before.
    """
    num_packed = 0
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if gains(child, make_linear):
                make = make_head if make_head and child is head else make_linear
                setattr(parent, name, _packed(child, make, store, f"{prefix}{path}.{name}"))
                num_packed += 1
    return num_packed


def gains(module: nn.Module, make_linear: LinearFactory = linear_of) -> TypeGuard[nn.Linear | Conv1D]:
    """True if `pack_linears` replaces `module`, a plain linear layer."""
    weight = weight_of(module)
    return weight is not None and (not keeps_numbers(make_linear) or can_pack(weight, rows_dtype(make_linear)))


def weight_of(module: nn.Module) -> Tensor | None:
    """The weight [out, in] of a plain linear layer; None for a subclass, which may compute something else."""
    if type(module) is Conv1D:
        return read_weight(cast("Tensor", module.weight)).t()  # GPT-2's linear, stored as [in, out]
    return module.weight if type(module) is nn.Linear else None


def _packed(linear: nn.Linear | Conv1D, make_linear: LinearFactory, store: WeightStore, name: str) -> PackedLinear:
    weight, bias = weight_of(linear), linear.bias
    assert weight is not None, "`gains` takes plain layers only"
    dtype = rows_dtype(make_linear) or weight.dtype
    packed = PackedLinear(weight.shape, store.product(name, lambda: make_linear(weight, bias)), dtype)
    if not store.is_checked:
        compare_product(packed, weight, bias, dtype, is_exact=keeps_numbers(make_linear))
        drop_pages([weight])
    return packed


class ReadLinear(nn.Linear):
    """A linear layer that is not called: its router reads the weight, so it stays as it is."""


class SplitExperts(nn.Module):
    """Experts over rows in their order, each a linear layer; in place of one parameter of all experts."""

    def __init__(self, weights: Tensor) -> None:
        """`weights` are [experts, out, in], which the layers share."""
        super().__init__()
        self.experts = nn.ModuleList(_linear_of(weight) for weight in weights)

    def forward(self, rows: Tensor, num_rows: list[int]) -> Tensor:
        """Return the results of the first rows by the first expert, and so on; [rows, in] -> [rows, out]."""
        parts = zip(self.experts, rows.split(num_rows), strict=True)
        return torch.cat([expert(part) for expert, part in parts if len(part)])


def plain_linears(model: nn.Module) -> None:
    """Make the layers of such a model ready for packing, in place."""
    for module in list(model.modules()):
        if isinstance(module, LongcatFlashTopkRouter):
            module.classifier.__class__ = ReadLinear
        for name, child in list(module.named_children()):
            if isinstance(child, JetMoeParallelExperts):
                setattr(module, name, SplitExperts(read_weight(child.weight)))


def _linear_of(weight: Tensor) -> nn.Linear:
    num_outputs, num_inputs = weight.shape
    linear = nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear

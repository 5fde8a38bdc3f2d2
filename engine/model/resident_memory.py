"""Removes the checkpoint's pages from a served model's memory.

On a processor, transformers' tensors are views of a mapped file. One such tensor keeps the whole file mapped, and every
page that was read stays resident until it is dropped.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor, nn

from engine.model.checkpoint.node_memory import drop_pages
from engine.model.checkpoint.unread_weight import UnreadWeight, read_weight
from engine.model.linear.packed_experts import packed_parameters
from engine.model.linear.packed_linear import LinearFactory, gains
from engine.model.linear.weight_store import NO_STORE, WeightStore


def leave_checkpoint(
    model: nn.Module,
    make_linear: LinearFactory,
    dtype: torch.dtype | None = None,
    *,
    keeps_embeddings: bool = False,
    store: WeightStore = NO_STORE,
) -> None:
    """Replace the tensors that `make_linear` will not pack by copies in memory, one by one.

    Copies have `dtype`; None keeps each tensor's own. With `keeps_embeddings`, plain embeddings keep theirs. The files
    are unmapped when the last linear layer is packed. Modules that share a parameter (a tied embedding) share its copy.
    `store` may keep large copies.
    """
    copied = packed_parameters(model, make_linear)
    read: dict[Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        is_packed = gains(module, make_linear)
        is_kept = keeps_embeddings and type(module) is nn.Embedding
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in copied or (is_packed and name == "weight"):
                continue
            # A tied parameter was copied with its first module.
            if parameter in read:
                setattr(module, name, read[parameter])
                continue
            # Copy it, large ones into the store, and let go of the file's pages.
            stored = parameter.data
            own_dtype = _own_dtype(stored, dtype, is_kept=is_kept)
            keeper = store if parameter.nbytes >= 1 << 20 else NO_STORE
            own = keeper.product(f"{path}.{name}", partial(_copied, parameter, own_dtype))
            if isinstance(parameter, UnreadWeight):
                read[parameter] = nn.Parameter(own, requires_grad=False)
                setattr(module, name, read[parameter])
            else:
                drop_pages([stored])
                parameter.data = own
                copied.add(id(parameter))
            if is_kept and own.dtype is not dtype:
                module.register_forward_hook(partial(_cast_output, dtype))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())  # a view would keep its whole base alive


def _own_dtype(stored: Tensor, dtype: torch.dtype | None, *, is_kept: bool) -> torch.dtype:
    if dtype is None or not stored.is_floating_point():
        return stored.dtype
    return min(stored.dtype, dtype, key=lambda each: each.itemsize) if is_kept else dtype


def _copied(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return read_weight(parameter).detach().to(dtype, copy=not isinstance(parameter, UnreadWeight))


def _cast_output(dtype: torch.dtype | None, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.to(dtype)


def trim_heap() -> None:
    """Return freed memory to the system; after packing and probing glibc keeps a quarter of a small model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

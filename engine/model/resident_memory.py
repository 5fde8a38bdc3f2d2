"""Resident memory of a served model: its packed and unpacked weights, without pages of the checkpoint.

On a processor transformers' tensors are views of a mapped file. One remaining tensor keeps the whole file mapped.
"""

from __future__ import annotations

import ctypes

from torch import nn

from engine.model.linear.packed_linear import LinearFactory, gains


def leave_checkpoint(model: nn.Module, make_linear: LinearFactory) -> None:
    """Copy every tensor that packing with `make_linear` leaves unpacked out of the files, one by one, in place.

    The files are unmapped when the last linear layer is packed. Modules that share a parameter
    (a tied embedding) share its copy.
    """
    for module in model.modules():
        is_packed = gains(module, make_linear)
        for name, parameter in module.named_parameters(recurse=False):
            if not (is_packed and name == "weight"):
                parameter.data = parameter.data.clone()
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())  # a view would keep its whole base alive


def trim_heap() -> None:
    """Return freed memory to the system; after packing and probing glibc keeps a quarter of a small model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

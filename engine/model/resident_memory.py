"""What a served model keeps in memory: its packed weights and what is not packed, and no page of the checkpoint beside.

transformers' tensors on a processor lie in a mapping of their file, and a single one that is left holds the pages of
all the others.
"""

from __future__ import annotations

import ctypes

from torch import nn

from engine.model.linear.packed_linear import LinearFactory, gains


def leave_checkpoint(model: nn.Module, make_linear: LinearFactory) -> None:
    """Give every tensor that packing with `make_linear` will leave memory of its own, one after the other, in place.

    The files are unmapped when the last linear layer is packed. Parameters that modules share (a tied embedding) they
    still share.
    """
    for module in model.modules():
        is_packed = gains(module, make_linear)
        for name, parameter in module.named_parameters(recurse=False):
            if not (is_packed and name == "weight"):
                parameter.data = parameter.data.clone()
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())  # some are views, which would keep what they are views of


def trim_heap() -> None:
    """Give back what packing and probing have freed: glibc keeps such memory for later, a quarter of a small model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""What a served model keeps in memory: its packed weights and what is not packed, and no page of the checkpoint beside.

transformers' tensors on a processor lie in a mapping of their file, and a single one that is left holds the pages of
all the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from torch import Tensor, nn

from engine.packed_linear import LinearFactory, gains


def leave_checkpoint(model: nn.Module, make_linear: LinearFactory) -> None:
    """Give every tensor that packing with `make_linear` will leave memory of its own, one after the other, in place.

    The files are unmapped when the last linear layer is packed. What modules share (a tied embedding) they still share.
    Tensors on a device have left the files already.
    """
    kept = {id(tensor): tensor for module in model.modules() for tensor in _left_by_packing(module, make_linear)}
    for tensor in kept.values():
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def _left_by_packing(module: nn.Module, make_linear: LinearFactory) -> Iterator[Tensor]:
    is_packed = gains(module, make_linear)
    for name, parameter in module.named_parameters(recurse=False):
        if not (is_packed and name == "weight"):
            yield parameter
    yield from module.buffers(recurse=False)


def trim_heap() -> None:
    """Give back what packing and probing have freed: glibc keeps such memory for later, a quarter of a small model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

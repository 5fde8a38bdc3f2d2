"""The recurrences of Mamba-2 and of the gated delta rule by our kernel, where it is compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.batch.span import SpanStates
from engine.native.library import kernels_for

_NUM_TENSORS, _NUM_SIZES = 10, 5


class ScanSlots:
    """The spans of a pass for the kernel: the slot before each, its last row, and the slot after each row or -1."""

    def __init__(self, states: Seq[SpanStates], starts: Seq[int], ends: Seq[int]) -> None:
        after = [-1] * ends[-1]
        for each, start in zip(states, starts, strict=True):
            for rows, slot in each.after.items():
                after[start + rows - 1] = slot
        columns = ([each.before for each in states], ends, after)
        self.tensors = [torch.tensor(column, dtype=torch.int64) for column in columns]


def scan(*rows: Tensor, matrices: Tensor, slots: ScanSlots, is_delta: bool) -> Tensor | None:
    """Return the outputs of a layer and keep the states of its slots; None without a kernel for it.

    Args:
        rows: x, steps, decay, b and c of `scan_mamba2`; value, beta, decay, key and query of `scan_delta`.
        matrices: the layer's states.
        slots: the pass's spans.
        is_delta: the rows belong to the delta rule.
    """
    library = kernels_for(torch.float32) if matrices.device.type == "cpu" else None
    if library is None:
        return None
    rows = tuple(each.contiguous() for each in rows)
    out = torch.empty_like(rows[0])
    (_, heads, width), (_, groups, depth) = rows[0].shape, rows[3].shape
    pointers = (each.data_ptr() for each in (*rows, out, matrices, *slots.tensors))
    sizes = (len(slots.tensors[0]), heads, groups, width, depth)
    return out if _kernel(library)(*pointers, *sizes, int(is_delta)) else None


@cache
def _kernel(library: ctypes.CDLL) -> Any:
    kernel = library.outrider_scan
    kernel.argtypes = [ctypes.c_void_p] * _NUM_TENSORS + [ctypes.c_int64] * _NUM_SIZES + [ctypes.c_int]
    kernel.restype = ctypes.c_int
    return kernel

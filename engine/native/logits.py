"""Converts logits to float32, finds the maximum and checks for finite rows, with our kernels or else with torch.

With a large vocabulary, torch uses all its threads. An OpenMP region waits for all of them, which takes milliseconds
while the helpers of our kernels occupy the cores.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.native.library import Instructions, kernels_for, native_library


def widened(logits: Tensor) -> Tensor:
    """Return `logits.float()`."""
    if not _is_ours(logits, torch.bfloat16):
        return logits.float()
    wide = torch.empty_like(logits, dtype=torch.float32)
    _kernels()[0](logits.data_ptr(), wide.data_ptr(), logits.numel())
    return wide


def highest(scores: Tensor) -> Tensor:
    """Return `scores.argmax(dim=1)` of `scores` [R, V], [R] int64: the lowest index among equal maxima."""
    num_rows, size = scores.shape
    if not _is_ours(scores, torch.float32) or size == 0:
        return scores.argmax(dim=1)
    chosen = torch.empty(num_rows, dtype=torch.int64)
    has_numbers = _kernels()[1](scores.data_ptr(), num_rows, size, chosen.data_ptr())
    return chosen if has_numbers else scores.argmax(dim=1)


def are_finite(logits: Tensor) -> Tensor:
    """True for each row of `logits` [R, V] with a finite maximum and without NaN, [R] bool; -inf is allowed."""
    num_rows, size = logits.shape
    if not _is_ours(logits, torch.float32) or size == 0:
        return logits.amax(dim=1).isfinite()
    flags = torch.empty(num_rows, dtype=torch.int64)
    _kernels()[2](logits.data_ptr(), num_rows, size, flags.data_ptr())
    return flags.bool()


def _is_ours(numbers: Tensor, dtype: torch.dtype) -> bool:
    is_plain = numbers.dtype is dtype and numbers.device.type == "cpu" and numbers.is_contiguous()
    return is_plain and kernels_for(dtype) is not None


@cache
def _kernels() -> tuple[Any, Any, Any]:
    library = native_library(Instructions.AVX2)
    assert library is not None, "call `_is_ours` first"
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    widen, choose, check = library.outrider_widen, library.outrider_choose, library.outrider_check
    widen.argtypes = [pointer, pointer, size]
    choose.argtypes = check.argtypes = [pointer, size, size, pointer]
    widen.restype, choose.restype, check.restype = None, ctypes.c_int, None
    return widen, choose, check

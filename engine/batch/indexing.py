"""Fast indices for tensors: a slice for consecutive values, a tensor otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.span import Span

Index = slice | Tensor


@cache
def has_triton() -> bool:
    """True if Triton is installed."""
    return find_spec("triton") is not None


def runs_triton(tensor: Tensor) -> bool:
    """True if Triton kernels can compute on a tensor's device."""
    return tensor.is_cuda and has_triton()


def index_of(values: Seq[int], device: torch.device) -> Index:
    """Return `values` (at least one) as a slice if they are consecutive: a slice costs no copy."""
    return slice(values[0], values[0] + len(values)) if is_consecutive(values) else index_tensor(values, device)


def is_consecutive(values: Seq[int]) -> bool:
    """True if each value is one more than the value before it."""
    first, num_values = values[0], len(values)
    return values[-1] - first == num_values - 1 and list(values) == list(range(first, first + num_values))


def index_tensor(values: Iterable[int], device: torch.device) -> Tensor:
    """Return `values` as [n] int64 on `device`."""
    return upload(list(values), torch.long, device)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from main memory to `device`; a copy to a GPU uses pinned memory and does not block."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def send_arrays(arrays: Seq[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to `device` as one copy that does not block.

    Each starts at a multiple of 64 bytes: Triton compiles a kernel again for pointers with another alignment.
    """
    starts = [0, *accumulate(-(-array.nbytes // 64) * 64 for array in arrays)]
    whole = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        whole.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = whole.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def upload(values: Seq[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of (nested) numbers; a copy to a GPU uses pinned memory and does not block."""
    if device.type == "cuda" and values:
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, device=device)


def copy_into(buffer: Tensor, values: Seq[object]) -> None:
    """Overwrite a tensor with (nested) numbers of its shape; a copy to a GPU does not block."""
    if buffer.device.type == "cuda":
        buffer.copy_(torch.tensor(values, dtype=buffer.dtype, pin_memory=True), non_blocking=True)
    else:
        buffer.copy_(torch.tensor(values, dtype=buffer.dtype))


def copy_array(buffer: Tensor, values: NDArray[np.number]) -> None:
    """Overwrite a tensor with an array of its shape; a copy to a GPU does not block."""
    rows = torch.from_numpy(values)
    if buffer.device.type == "cuda":
        buffer.copy_(rows.to(buffer.dtype).pin_memory(), non_blocking=True)
    else:
        buffer.copy_(rows)


def slots_of(span: Span, block_size: int) -> list[int]:
    """Return the slot of each of the span's rows."""
    table = span.block_table
    return [table[at // block_size] * block_size + at % block_size for at in range(span.start, span.end)]

"""Indices as tensors can use them fastest: a slice where they follow each other, a tensor elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

Index = slice | Tensor


def index_of(values: Seq[int], device: torch.device) -> Index:
    """`values` (at least one) as a slice if each is one more than the last: a slice costs no copy."""
    return slice(values[0], values[0] + len(values)) if is_run(values) else index_tensor(values, device)


def is_run(values: Seq[int]) -> bool:
    """Whether each value is one more than the last."""
    first, num_values = values[0], len(values)
    return values[-1] - first == num_values - 1 and list(values) == list(range(first, first + num_values))


def index_tensor(values: Iterable[int], device: torch.device) -> Tensor:
    """[n] int64 on `device`."""
    return upload(list(values), torch.long, device)


def upload(values: Seq[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of (nested) numbers; to a GPU they go through pinned memory, and the host does not wait for it."""
    if device.type == "cuda":
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, device=device)

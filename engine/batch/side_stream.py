"""Copies between a GPU and main memory next to its passes: on a stream of their own, from and to pinned memory.

A copy on the engine's stream begins after all passes that the host has issued. Pinned memory comes from torch's cache,
which keeps freed memory for the next copy. On a processor nothing is copied and nothing waits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a GPU's copies."""
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


class PendingTensor:
    """A tensor that the current stream will have computed, for another thread; making one does not wait.

    The tensor must not change until it has been read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def num_bytes(self) -> int:
        return self._tensor.nbytes

    def on_device(self) -> Tensor:
        """Wait until the tensor is computed, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor

    def in_main_memory(self) -> Tensor:
        """Wait until the tensor is computed, and return it or a copy in main memory."""
        tensor = self.on_device()
        if self._event is None:
            return tensor
        with torch.cuda.stream(side_stream(tensor.device)):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of main memory in pinned memory if it is for a GPU."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor


def arrived(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of main memory or of the side stream on `device`, for the current stream's further work."""
    if device.type != "cuda":
        return tensor.to(device)
    side, current = side_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        copied = tensor.to(device, non_blocking=True)
    current.wait_stream(side)
    copied.record_stream(current)  # else the next arrival could overwrite it before the current stream reads it
    return copied

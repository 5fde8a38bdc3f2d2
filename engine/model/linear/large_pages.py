"""Memory for packed weights in pages of 2 MiB, if the system has them.

A pass reads every weight once. With pages of 4 KiB, every 64 cache lines need another entry of the page table, which a
virtual machine translates twice: two cores of a Xeon read 25 GB/s, and 35 GB/s with large pages (docs/benchmarks.md).
Small matrices share a page.
"""

from __future__ import annotations

import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
LINE_BYTES = 64  # of the cache

_left = torch.empty(0, dtype=torch.uint8)  # of the newest region; a region is freed with the last tensor in it
_lock = threading.Lock()


def empty_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor in main memory, aligned to a cache line."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = _take(-(-num_bytes // LINE_BYTES) * LINE_BYTES)
    return memory[:num_bytes].view(dtype).view(shape)


def _take(num_bytes: int) -> Tensor:
    """Return so many bytes, a whole number of lines, [num_bytes] uint8."""
    global _left
    with _lock:
        if num_bytes > len(_left):
            _left = _region(max(16 * PAGE_BYTES, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES))  # resident as it fills
        taken, _left = _left[:num_bytes], _left[num_bytes:]
        return taken


def _region(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a Linux without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE_BYTES
    return whole[first : first + num_bytes]

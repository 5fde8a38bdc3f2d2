"""Memory that this process may still allocate, the node's or its container's if that is less; and pages of files."""

from __future__ import annotations

import ctypes
import math
import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.config import GIB
from engine.model.checkpoint.weight_files import FLOATS, tensor_headers
from protos.errors import ConfigError

if TYPE_CHECKING:  # the command line looks at memory without torch
    from torch import Tensor

_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)
_CGROUP = Path("/sys/fs/cgroup")
_FILE_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]", re.MULTILINE)  # the last number is an inode


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the available bytes; `cgroup` is the container's control group (version 2)."""
    available = int(psutil.virtual_memory().available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    return min(available, max(0, limit - used + _inactive_bytes(cgroup / "memory.stat")))


def check_memory(folder: Path, name: str, float_bytes: float) -> None:
    """Raise ConfigError before loading if this node has less memory than all weights take.

    The bound is a lower one, without caches and copies: `float_bytes` per float and one byte per other number. Without
    this check the kernel would kill this process, or another one, in the middle of loading.
    """
    needed = sum(
        math.prod(header.shape) * (float_bytes if header.dtype in FLOATS else 1)
        for header in tensor_headers(folder).values()
    )
    if needed > (available := available_bytes()):
        raise ConfigError(
            f"the weights of {name!r} take {needed / GIB:.1f} GiB, but this node has "
            f"{available / GIB:.1f} GiB of memory available; take a smaller or quantized model, or a larger node"
        )


def check_pool_memory(needed: int) -> None:
    """Raise ConfigError if a full KV pool of `needed` bytes exceeds this node's memory."""
    if needed > (available := available_bytes()):
        raise ConfigError(
            f"the KV pool takes up to {needed / GIB:.1f} GiB, but this node has {available / GIB:.1f} GiB of memory "
            "available; lower cache.memory_gib or cache.num_blocks, or take a larger node"
        )


def _number(file: Path) -> int | None:
    """Return the number in a file; None without a file or a limit ("max")."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _inactive_bytes(file: Path) -> int:
    """Return the bytes of inactive cached files, which the kernel reclaims first."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def drop_pages(tensors: Iterable[Tensor]) -> None:
    """Drop the resident pages of tensors that a file backs; a later use reads them again.

    Such tensors are never written to, so nothing is lost. All are taken, one after the other; files may be mapped or
    unmapped only between calls.
    """
    files = [] if _DONTNEED is None else _file_mappings()
    for tensor in tensors:
        if tensor.device.type != "cpu":
            continue
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(low <= first and last <= high for low, high in files):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED)


def _file_mappings() -> list[tuple[int, int]]:
    """Return the address ranges of this process that files back; none where the system does not list them."""
    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return []
    return [(int(begin, 16), int(end, 16)) for begin, end in _FILE_MAPPING.findall(maps)]

"""The memory that this process may still take: the node's, or its container's where that is less."""

from __future__ import annotations

import math
from pathlib import Path

import psutil

from engine.model.checkpoint.weight_files import tensor_headers
from protos.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30
_FLOATS = ("BF16", "F16", "F32", "F64")  # loaded in the model's dtype; others are packed


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the available bytes; `cgroup` is the container's control group (version 2)."""
    available = int(psutil.virtual_memory().available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    return min(available, max(0, limit - used + _inactive_bytes(cgroup / "memory.stat")))


def check_memory(folder: Path, name: str, float_bytes: int) -> None:
    """Raise ConfigError before a weight is read if this node has less memory than all of them take.

    It is a floor, without caches and copies, of `float_bytes` for each float and one for each other number. Without it
    the kernel would end this process, or another one, in the middle of loading.
    """
    needed = sum(
        math.prod(header.shape) * (float_bytes if header.dtype in _FLOATS else 1)
        for header in tensor_headers(folder).values()
    )
    if needed > (available := available_bytes()):
        raise ConfigError(
            f"the weights of {name!r} take {needed / _GIB:.1f} GiB, and this node has "
            f"{available / _GIB:.1f} GiB of memory available; take a smaller or quantized model, or a larger node"
        )


def check_pool_memory(needed: int) -> None:
    """Raise ConfigError if this node has less memory than a KV pool of `needed` bytes takes once it is full."""
    if needed > (available := available_bytes()):
        raise ConfigError(
            f"the KV pool takes up to {needed / _GIB:.1f} GiB, and this node has {available / _GIB:.1f} GiB of memory "
            "available; lower cache.memory_gib or cache.num_blocks, or take a larger node"
        )


def _number(file: Path) -> int | None:
    """Return the number in a file; None where there is no file, or no limit ("max")."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _inactive_bytes(file: Path) -> int:
    """Return the bytes of cached files, which the kernel gives up before anything else."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))

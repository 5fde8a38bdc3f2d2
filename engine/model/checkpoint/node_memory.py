"""The memory that this process may still take: the node's, or its container's where that is less."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the available bytes; `cgroup` is the container's control group (version 2)."""
    available = int(psutil.virtual_memory().available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    return min(available, max(0, limit - used + _inactive_bytes(cgroup / "memory.stat")))


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

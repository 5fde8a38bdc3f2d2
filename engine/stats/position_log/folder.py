"""The folder of a log: its files by age, and room for the next one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine.stats.position_log.shard import PARTIAL, SUFFIX

_STALE_S = 600.0  # after which a file that is still being written is of a process that was killed


class LogFolder:
    """The files of all processes that write into one folder, together never more than `max_bytes` for long."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def new_file(self) -> Path:
        """Return the path of a file that no other process has; names in order are files in order of time."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._path / f"{time.time_ns():020d}-{os.getpid()}{SUFFIX}"

    def make_room(self, current: Path) -> None:
        """Remove what killed processes have left, and the oldest files until the rest fit; never the `current` one."""
        for file in self._path.glob(f"*{PARTIAL}"):
            if _age_s(file) > _STALE_S:
                file.unlink(missing_ok=True)
        files = [(file, _size(file)) for file in log_files(self._path)]
        excess = sum(size for _, size in files) - self._max_bytes
        for file, size in files:
            if excess <= 0:
                return
            if file != current:
                file.unlink(missing_ok=True)
                excess -= size


def log_files(path: Path) -> list[Path]:
    """Return the files of a log, the oldest first."""
    return sorted(path.glob(f"*{SUFFIX}"))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # another process has removed it
        return 0


def _age_s(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0

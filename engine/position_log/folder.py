"""The folder of a log: lists its files by age and removes the oldest."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine.position_log.shard import PARTIAL, SUFFIX

_STALE_S = 600.0  # an older partial file was left by a killed process


class LogFolder:
    """The files of all processes that write into one folder. `make_room` limits them to `max_bytes` together."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def new_file(self) -> Path:
        """Return an unused path. Names sort by time and include the process id, so they are unique."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._path / f"{time.time_ns():020d}-{os.getpid()}{SUFFIX}"

    def make_room(self, current: Path) -> None:
        """Remove partial files of killed processes, and the oldest files until the rest fit, but not `current`."""
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
    """Return the files of a log, oldest first."""
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

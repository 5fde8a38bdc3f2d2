"""The part of a log after a given moment: earlier positions belong to other traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.position_log.folder import log_files
from engine.position_log.shard import count_shard
from protos.errors import ConfigError

LogEnd = Mapping[str, tuple[int, int]]  # requests and positions of each file, by its name

_POLL_S = 1.0


def log_end(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the present content of the log, without files that are damaged or were deleted meanwhile."""
    found = {}
    for file in log_files(folder) if folder.is_dir() else []:
        try:
            found[file.name] = count_shard(file)
        except ConfigError:
            continue
    return found


def wait_for_positions(
    folder: Path, end: LogEnd, num_positions: int, timeout_s: float, report: Callable[[str], None]
) -> None:
    """Wait until the log has `num` positions after `end`, or the time is over."""
    report(f"waiting for {num_positions} new positions, {timeout_s / 60:.0f} minutes at most")
    until_s, num_found = time.monotonic() + timeout_s, 0
    while num_found < num_positions and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        now = log_end(folder)
        num_found = sum(number - end.get(name, (0, 0))[1] for name, (_, number) in now.items())
    report(f"{num_found} positions are new")

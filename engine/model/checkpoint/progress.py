"""Progress of fetching or reading a model, in bytes: shown by `outrider serve`, or else logged.

`OUTRIDER_PROGRESS_FOLDER` names a folder that belongs to the waiting command. Each process on its machine writes one
file there per activity. Without the variable, as on a cluster, a line is logged every few seconds.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "OUTRIDER_PROGRESS_FOLDER"
_numbers = count()


@dataclass(frozen=True, slots=True)
class Progress:
    """Finished bytes of one activity on a model."""

    activity: str  # "fetching", "reading"
    model: str
    num_bytes: int
    total_bytes: int
    elapsed_s: float
    first_bytes: int = 0  # present at the start

    @property
    def is_done(self) -> bool:
        return self.num_bytes >= self.total_bytes

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the mean speed so far; None until a speed is known."""
        done = self.num_bytes - self.first_bytes
        return self.elapsed_s * (self.total_bytes - self.num_bytes) / done if done > 0 else None

    def __str__(self) -> str:
        left = "" if self.left_s is None or self.is_done else f", {self.left_s:.0f} s left"
        return f"{self.activity} {self.model}: {_size(self.num_bytes)} of {_size(self.total_bytes)}{left}"


class ProgressReport:
    """Reports the progress of one activity of this process."""

    def __init__(
        self,
        activity: str,
        model: str,
        total_bytes: int,
        first_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = Progress(activity, model, first_bytes, total_bytes, 0.0, first_bytes)
        self._clock = clock
        self._began_s = self._told_s = clock()
        folder = os.environ.get(FOLDER_VARIABLE)
        self._file = None if folder is None else Path(folder) / f"{os.getpid()}-{next(_numbers)}.json"
        self.at(first_bytes)

    def at(self, num_bytes: int) -> None:
        """Record the finished bytes; report the first and last call, and others at intervals."""
        now_s = self._clock()
        progress = replace(self._start, num_bytes=num_bytes, elapsed_s=now_s - self._began_s)
        period_s = 5.0 if self._file is None else 0.2
        if now_s - self._told_s >= period_s or progress.is_done or now_s == self._began_s:
            self._told_s = now_s
            self._tell(progress)

    def _tell(self, progress: Progress) -> None:
        if self._file is None:
            logger.info("%s", progress)
            return
        unfinished = self._file.with_suffix(".new")
        try:
            unfinished.write_text(json.dumps(asdict(progress)), encoding="utf-8")
            unfinished.replace(self._file)
        except OSError:  # the waiting command has ended and removed its folder
            self._file = None


def read_progress(folder: Path) -> dict[str, Progress]:
    """Return the reports that processes wrote into `folder`, by file name."""
    return {file.name: Progress(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("*.json")}


def _size(num_bytes: int) -> str:
    """Format a size in decimal units, as disks and networks use them."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"

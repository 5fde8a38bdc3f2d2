"""A process and everything it started: what memory they took at most, and their certain end."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0


class ProcessTree:
    """Kills the process and its descendants when `deadline_s` have passed, or at `close`, whichever comes first."""

    def __init__(self, pid: int, deadline_s: float) -> None:
        self._root = psutil.Process(pid)
        self._known: dict[int, psutil.Process] = {pid: self._root}
        self._deadline_s = deadline_s
        self._timer = threading.Timer(deadline_s, self._kill_late)
        self._timer.daemon = True
        self._timer.start()
        self.is_late = False

    def peak_bytes(self) -> dict[str, int]:
        """Return each living process's largest resident memory so far, by its name; processes of one name are added."""
        self._look_again()
        peaks: dict[str, int] = {}
        for process in self._known.values():
            try:
                name, peak = _name_of(process), _peak_bytes(process.pid)
            except (psutil.Error, OSError):
                continue
            peaks[name] = peaks.get(name, 0) + peak
        return peaks

    def _look_again(self) -> None:
        """Remembers descendants while their parents live: afterwards they could not be found."""
        try:
            self._known |= {child.pid: child for child in self._root.children(recursive=True)}
        except psutil.Error:
            logger.debug("process %d has ended", self._root.pid)

    def _kill_late(self) -> None:
        self.is_late = True
        logger.error("process %d did not end within %.0f s; killed", self._root.pid, self._deadline_s)
        self._kill()

    def _kill(self) -> None:
        self._look_again()
        for process in self._known.values():
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(list(self._known.values()), timeout=END_TIMEOUT_S)

    def close(self) -> None:
        self._timer.cancel()
        self._kill()


def _name_of(process: psutil.Process) -> str:
    """Ray's workers write what they are into their command line."""
    title = (process.cmdline() or [""])[0]
    return title if title.startswith("ray::") else process.name()


def _peak_bytes(pid: int) -> int:
    """VmHWM of /proc, which counts from the start of the process (Linux only)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0

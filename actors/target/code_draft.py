"""A class of the operator's that drafts (`draft.kind: python`), in a process that may fail or hang."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from actors.channel.channel_proposer import ChannelProposer
from actors.channel.draft_link import DRAFT_SOCKET
from actors.draft.code_process import READY
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 120.0


class CodeDraft(ChannelProposer):
    """Starts the process, and starts it again when it has ended or hangs. Each failure in a row doubles the pause."""

    # Seconds of passes without an answer: then the process hangs.
    def __init__(self, folder: Path, name: str, *, silent_s: float = 10.0, pause_s: float = 1.0) -> None:
        """Return when the class `name` drafts.

        Raises:
            ConfigError: it cannot be loaded.
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        self._socket = folder / DRAFT_SOCKET
        super().__init__(self._socket)
        self._name, self._silent_limit_s, self._pause_s = name, silent_s, pause_s
        self._closing = threading.Event()
        self._process = self._started()
        threading.Thread(target=self._watch, name="draft-watch", daemon=True).start()

    def close_process(self) -> None:
        """End the process for good."""
        self._closing.set()
        self._process.kill()
        self._process.wait()

    def _started(self) -> subprocess.Popen[str]:
        self._socket.unlink(missing_ok=True)
        self._num_before = self.stats.num_connections
        return _start(self._socket, self._name)

    def _watch(self) -> None:
        pause_s = self._pause_s
        while not self._closing.is_set():
            steady_s = self._outlive()
            if self._closing.is_set():
                return
            # After 60 s of drafting a failure is the first one again.
            pause_s = self._pause_s if steady_s > 60.0 else min(2 * pause_s, 300.0)
            logger.error("draft.code %s is started again in %.0f s", self._name, pause_s)
            if self._closing.wait(pause_s):
                return
            try:
                self._process = self._started()
            except ConfigError as error:
                logger.error("%s", error.message)

    def _outlive(self) -> float:
        """Return when the process has ended, by itself or because it hangs, with the seconds that it ran."""
        ran_s, period_s = 0.0, min(0.2, self._silent_limit_s)
        while True:
            try:
                code = self._process.wait(period_s)
            except subprocess.TimeoutExpired:
                ran_s += period_s
                stats = self.stats
                if stats.num_connections > self._num_before and stats.silent_s > self._silent_limit_s:
                    logger.error("draft.code %s hangs: no answer for %.0f s", self._name, stats.silent_s)
                    self._process.kill()
                continue
            logger.error("the process of draft.code %s ended with code %d", self._name, code)
            return ran_s


def check_code(name: str, timeout_s: float = _LOAD_TIMEOUT_S) -> None:
    """Load the class `name` in a process of its own, as a pair does, and end the process.

    Raises:
        ConfigError: it cannot be loaded.
    """
    with TemporaryDirectory() as folder:
        process = _start(Path(folder) / DRAFT_SOCKET, name, timeout_s)
        process.kill()
        process.wait()


def _start(socket: Path, name: str, timeout_s: float = _LOAD_TIMEOUT_S) -> subprocess.Popen[str]:
    """Return the process of the class `name` when it listens at `socket`; raises ConfigError if it cannot be loaded."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "actors.draft.code_process", str(socket), name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None, "it is a pipe"
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    report = process.stdout.readline().strip()
    timer.cancel()
    process.stdout.close()
    if report == READY:
        return process
    process.kill()
    process.wait()
    raise ConfigError(report or f"draft.code {name!r} was not loaded within {timeout_s:g} s, or its process ended")

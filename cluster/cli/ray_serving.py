"""A deployment on a Ray cluster of this machine: started, watched, and stopped by Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cluster.cli.console import report
from cluster.cli.invitation import invitation, race_in_terminal
from cluster.deploy_file import DeployFile
from cluster.local_cluster import AppStatus, LocalCluster
from cluster.placement import most_gpus
from cluster.replica_settings import placement_request

_REPORT_PERIOD_S = 5.0
_LOGS = "/tmp/ray/session_latest/logs"


class Interrupt:
    """The signals SIGINT and SIGTERM: the first asks to stop, a second one insists."""

    def __init__(self) -> None:
        self.is_set = threading.Event()
        self._is_breaking = False
        self.listen()

    def listen(self) -> None:
        """Catch the signals from now on. Called again after Ray has started, which takes SIGTERM for itself."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.is_set.is_set():
            raise KeyboardInterrupt
        self.is_set.set()
        if self._is_breaking:
            raise InterruptedStartError

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Let the first signal end the block at once, by `InterruptedStartError`."""
        self._is_breaking = True
        try:
            if self.is_set.is_set():
                raise InterruptedStartError
            yield
        finally:
            self._is_breaking = False


class InterruptedStartError(Exception):
    """Ctrl-C while the deployment was starting."""


def serve_on_ray(file: DeployFile) -> None:
    """Serve until Ctrl-C. Raises ConfigError if the deployment fails, KeyboardInterrupt for a second Ctrl-C."""
    interrupt = Interrupt()
    cluster = LocalCluster()
    began_s = time.monotonic()
    try:
        report("[1/3] starting a Ray cluster on this machine")
        cluster.start(ingress=file.config.ingress, gpus_per_pair=most_gpus(placement_request(file.config)))
        interrupt.listen()
        report(f"[2/3] loading weights: target {file.config.target.path}, draft {_draft_name(file)}")
        with interrupt.breaking():  # Ctrl-C reaches Ray's dashboard too, which then may never answer
            cluster.deploy(file)
        cluster.wait_running(_Progress(interrupt, began_s))
        report(f"[3/3] ready after {time.monotonic() - began_s:.0f} s\n\n{invitation(file, _LOGS)}")
        with interrupt.breaking():
            race_in_terminal(file)
        interrupt.is_set.wait()
        report("\nstopping: running requests may finish; Ctrl-C again to stop at once")
    except InterruptedStartError:
        report("\nstopping")
    finally:
        _stop(cluster)


def _stop(cluster: LocalCluster) -> None:
    try:
        cluster.stop()
    except KeyboardInterrupt:
        cluster.kill()


class _Progress:
    """A report of the wait every few seconds, which ends with the first signal."""

    def __init__(self, interrupt: Interrupt, began_s: float) -> None:
        self._interrupt = interrupt
        self._began_s = began_s
        self._reported_s = began_s

    def __call__(self, status: AppStatus) -> None:
        if self._interrupt.is_set.is_set():
            raise InterruptedStartError
        now_s = time.monotonic()
        if now_s - self._reported_s < _REPORT_PERIOD_S:
            return
        self._reported_s = now_s
        waiting = " and ".join(status.waiting) or "the application"
        reason = f": {lines[0]}" if (lines := status.message.splitlines()) else ""
        report(f"      {now_s - self._began_s:3.0f} s, waiting for {waiting}{reason}")


def _draft_name(file: DeployFile) -> str:
    return file.config.draft.path or file.config.draft.kind

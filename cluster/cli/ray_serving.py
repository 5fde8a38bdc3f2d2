"""A deployment on a Ray cluster of this machine: started, watched, and stopped by Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from cluster.cli.console import report
from cluster.cli.invitation import invitation, race_in_terminal
from cluster.cli.loading_view import LoadingView
from cluster.deploy_file import DeployFile
from cluster.local.local_cluster import AppStatus, LocalCluster, logs_folder
from cluster.local.serve_environment import refuse_ipv6
from cluster.placement.placement import most_gpus
from cluster.replica_settings import placement_request


class Interrupt:
    """The signals SIGINT and SIGTERM: the first one stops gently, the second one at once."""

    def __init__(self) -> None:
        self.is_set = threading.Event()
        self._is_breaking = False
        self.listen()

    def listen(self) -> None:
        """Catch the signals. Call again after Ray's start, since Ray takes SIGTERM for itself."""
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


def serve_on_ray(file: DeployFile, view: LoadingView, *, has_dashboard: bool = False) -> None:
    """Serve until Ctrl-C; `view` shows the start, and stops when it is over.

    Raises:
        ConfigError: the deployment fails, or its address is IPv6.
        KeyboardInterrupt: a second Ctrl-C.
    """
    refuse_ipv6(file.http_host)
    interrupt = Interrupt()
    cluster = LocalCluster()
    began_s = time.monotonic()
    try:
        report("[1/3] starting a Ray cluster on this machine")
        num_gpus = most_gpus(placement_request(file.config))
        cluster.start(ingress=file.config.ingress, gpus_per_pair=num_gpus, has_dashboard=has_dashboard)
        interrupt.listen()
        report(f"[2/3] loading weights: target {file.config.target.path}, draft {_draft_name(file)}")
        with interrupt.breaking():  # Ctrl-C reaches Ray's processes too, and they may never answer
            cluster.deploy(file)
        cluster.wait_running(partial(_follow, interrupt, view))
        view.stop()
        report(f"[3/3] ready after {time.monotonic() - began_s:.0f} s\n\n{invitation(file, str(logs_folder()))}")
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


def _follow(interrupt: Interrupt, view: LoadingView, status: AppStatus) -> None:
    """Show Serve's reason for waiting in the view; the first signal ends the wait."""
    if interrupt.is_set.is_set():
        raise InterruptedStartError
    waiting = " and ".join(status.waiting) or "the application"
    reason = f": {lines[0]}" if (lines := status.message.splitlines()) else ""
    view.waiting_for(f"{waiting}{reason}")


def _draft_name(file: DeployFile) -> str:
    return file.config.draft.path or file.config.draft.kind

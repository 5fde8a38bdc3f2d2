"""The served application as a child process of a benchmark: started from a deploy.yaml, awaited, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


class ServedApplication:
    """`cluster.cli serve` with one deploy.yaml; ready when /health answers 200.

    `wrapper` is a command that executes the one behind it, in surroundings of its own; `environment` is added to ours,
    and `options` to the command.
    """

    def __init__(
        self,
        deploy_yaml: Path,
        base_url: str,
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] = {},
        options: Sequence[str] = (),
    ) -> None:
        self._base_url = base_url
        self._log = deploy_yaml.with_suffix(".log").open("wb")
        command = [*wrapper, sys.executable, "-m", "cluster.cli", "serve", str(deploy_yaml), *options]
        variables = {**os.environ, **environment}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=variables)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Raises RuntimeError when the application ends or is not ready within START_TIMEOUT_S."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the application ended with {self._process.returncode}; see {self._log.name}")
            if self._is_healthy():
                return
            time.sleep(0.5)
        raise RuntimeError(f"the application was not ready after {START_TIMEOUT_S:.0f} s; see {self._log.name}")

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._base_url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(timeout=STOP_TIMEOUT_S)
        self._log.close()

"""The served application as a child process of a benchmark, started from a deploy.yaml on ports of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HTTP_PORT = 8100
GRPC_PORT = 9100
BASE_URL = f"http://127.0.0.1:{HTTP_PORT}/v1"
MODEL_ID = "bench"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0

DeployArgs = dict[str, Any]


class ServedApplication:
    """`cluster.cli serve` with one deploy.yaml; ready when /health answers 200.

    `wrapper` is a command that executes its arguments in an environment of its own. `environment` is added to ours, and
    `options` to the command.
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
        """Wait. Raises RuntimeError if the application ends or is not ready within START_TIMEOUT_S."""
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
            self._process.terminate()  # a script that runs in the background ignores SIGINT, and its processes too
            self._process.wait(timeout=STOP_TIMEOUT_S)
        self._log.close()


def start_served(path: Path, change: Callable[[DeployArgs], object], options: Sequence[str] = ()) -> ServedApplication:
    """Write the root deploy.yaml, with changed args and the ports of benchmarks, to `path`, and start to serve it.

    The caller waits until it is ready, and closes it.
    """
    deploy = yaml.safe_load(Path("deploy.yaml").read_text(encoding="utf-8"))
    deploy["http_options"]["port"], deploy["grpc_options"]["port"] = HTTP_PORT, GRPC_PORT
    change(deploy["applications"][0]["args"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(deploy, sort_keys=False), encoding="utf-8")
    return ServedApplication(path, f"http://127.0.0.1:{HTTP_PORT}", options=options)

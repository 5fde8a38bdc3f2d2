"""The served application as a child process of a benchmark, started from a deploy.yaml on ports of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.config import SchedulerConfig

HTTP_PORT = 8100
GRPC_PORT = 9100
BASE_URL = f"http://127.0.0.1:{HTTP_PORT}/v1"
CACHE_BYTES = 1 << 29
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
            self._process.send_signal(signal.SIGINT)
            self._process.wait(timeout=STOP_TIMEOUT_S)
        self._log.close()


@dataclass(frozen=True, slots=True)
class ServedPairSettings:
    """The settings of a benchmark's deployment.

    Without a draft model the target's own weights in int4 draft, or suffixes if the weights are int4 already.
    `is_adaptive` None means a fixed K with a draft model, else an adaptive one. `num_threads` None leaves threads to
    the placement.
    """

    target: Path
    draft: Path | None
    dtype: str = "bfloat16"
    num_threads: int | None = 2
    num_draft_tokens: int = 4
    is_deterministic: bool = False
    quantization: str = "none"
    max_stall_passes: float | None = SchedulerConfig().max_stall_passes
    kv_dtype: str = "auto"
    is_adaptive: bool | None = None

    @property
    def draft_kind(self) -> str:
        """The value of `draft.kind`."""
        if self.draft is not None:
            return "model"
        return "suffix" if self.quantization == "int4" else "self"

    def change(self, args: DeployArgs) -> None:
        """Apply these settings to the args of a deploy.yaml."""
        args["model_id"] = MODEL_ID
        args["target"] = {
            "path": str(self.target.resolve()),
            "dtype": self.dtype,
            "num_threads": self.num_threads,
            "deterministic": self.is_deterministic,
            "quantization": self.quantization,
        }
        args["draft"] = {"kind": self.draft_kind}
        if self.draft is not None:
            args["draft"] |= {"path": str(self.draft.resolve()), "dtype": self.dtype}
        is_adaptive = self.draft is None if self.is_adaptive is None else self.is_adaptive
        speculation = {"num_tokens": self.num_draft_tokens, "mode": "sync", "adaptive": is_adaptive}
        args["speculation"] = {**args.get("speculation", {}), **speculation}
        args["scheduler"]["max_stall_passes"] = self.max_stall_passes
        args["cache"] = {"memory_gib": CACHE_BYTES / (1 << 30), "dtype": self.kv_dtype}


def start_served(
    path: Path,
    change: Callable[[DeployArgs], object],
    source: Path = Path("deploy.yaml"),
    options: Sequence[str] = (),
) -> ServedApplication:
    """Write `source`, with changed args and the ports of benchmarks, to `path`, and start to serve it.

    The caller waits until it is ready, and closes it.
    """
    deploy = yaml.safe_load(source.read_text(encoding="utf-8"))
    deploy["http_options"]["port"], deploy["grpc_options"]["port"] = HTTP_PORT, GRPC_PORT
    change(deploy["applications"][0]["args"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(deploy, sort_keys=False), encoding="utf-8")
    return ServedApplication(path, f"http://127.0.0.1:{HTTP_PORT}", options=options)


def served_on(folder: Path, pair: ServedPairSettings, stack: ExitStack) -> str:
    """Return the OpenAI base URL of the pair, served until `stack` unwinds."""
    application = start_served(folder / "deploy.yaml", pair.change)
    stack.callback(application.close)
    application.wait_until_ready()
    return BASE_URL

"""A served application that a fault may touch: its processes, deploy.yaml, clock, messages and shared memory."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

from bench.served.application import ServedApplication
from cluster.deploy_file import with_absolute_paths
from cluster.local.serve_environment import free_port, set_variables
from tests.serve.chaos import interference
from tests.serve.chaos.interference import Orders
from tests.serve.chaos.processes import MARK, Processes, new_mark

MODEL = "chaos"
POLL_S = 0.25
RECOVERY_TIMEOUT_S = 180.0
REST_S, REST_TIMEOUT_S = 90.0, 300.0
_REQUEST_TIMEOUT_S = 120.0
_SHM_BYTES = 1 << 30
_STORE_BYTES = 400_000_000  # Ray's object store: it would else want a third of the memory, and not find it there
_MOUNT = f'mount -t tmpfs -o size={_SHM_BYTES} tmpfs /dev/shm && exec "$@"'
Args = dict[str, Any]


class ChaosWorld:
    """A served application: `start`, then faults, then `close`; `restart` if a fault ended it for good."""

    def __init__(self, folder: Path, change: Callable[[Args], None]) -> None:
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self.port, self._grpc_port = free_port(), free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._orders_path = self._folder / "interference"
        self._mark = new_mark()
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._application: ServedApplication | None = None
        self.struck_s = 0.0  # the monotonic time of the last fault
        self.deployment = self._bundled()
        change(self.args)

    @property
    def args(self) -> Args:
        args: Args = self.deployment["applications"][0]["args"]
        return args

    def _bundled(self) -> dict[str, Any]:
        deployment: dict[str, Any] = yaml.safe_load(Path("deploy.yaml").read_text())
        deployment["proxy_location"] = "HeadOnly"  # a second node would be this machine too
        deployment["http_options"]["port"], deployment["grpc_options"]["port"] = self.port, self._grpc_port
        deployment["applications"][0]["args"]["model_id"] = MODEL
        return deployment

    def start(self) -> None:
        """Start serving, and return when every replica is ready."""
        set_variables()  # Ray's token, for the dashboard and for clients of the cluster
        self.interfere(Orders())
        (self._folder / "sitecustomize.py").write_text("import tests.serve.chaos.interference\n")
        path = self._folder / "deploy.yaml"
        path.write_text(yaml.safe_dump(self.deployment, sort_keys=False))
        self._application = ServedApplication(path, self.base_url, _wrapper(), self._environment(), ("--dashboard",))
        self.processes = Processes(self._application.pid, self._mark)
        self._application.wait_until_ready()
        self.await_running()

    def _environment(self) -> dict[str, str]:
        return {
            MARK: self._mark,
            interference.VARIABLE: str(self._orders_path),
            "PYTHONPATH": f"{Path.cwd()}:{self._folder}",
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(_STORE_BYTES),
        }

    def close(self) -> None:
        """Stop everything."""
        if self._application is None:
            return
        for process in self.processes.all():
            with contextlib.suppress(psutil.Error):
                process.resume()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._application.close()
        for process in self.processes.all():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._application = None

    def restart(self) -> None:
        """Stop everything and start again."""
        self.close()
        self.start()

    def deploy(self, change: Callable[[Args], None], overrides: Sequence[dict[str, Any]] = ()) -> None:
        """Deploy the file with a change to its args on the running cluster, and return when all of it runs."""
        deployment = copy.deepcopy(self.deployment)
        change(deployment["applications"][0]["args"])
        if overrides:
            deployment["applications"][0]["deployments"] = list(overrides)
        _put_deployment(self.dashboard(), deployment)
        self.await_running()

    def await_running(self) -> None:
        """Return when the application runs and each of its deployments is healthy."""
        address = self.dashboard()
        self.eventually(lambda: _is_running(address), "the application runs")

    def dashboard(self) -> str:
        """Return host and port of Ray's dashboard."""
        for process in self.processes.all():
            if not any(word.endswith("dashboard/dashboard.py") for word in _words(process)):
                continue
            for connection in process.net_connections("tcp"):
                address = f"{connection.laddr.ip}:{connection.laddr.port}"
                if connection.status == psutil.CONN_LISTEN and _answers(address):
                    return address
        raise RuntimeError("Ray's dashboard does not run")

    def gcs_address(self) -> str:
        """Return host and port of Ray's GCS."""
        words = (word for process in self.processes.of("raylet") for word in _words(process))
        return next(word.partition("=")[2] for word in words if word.startswith("--gcs-address="))

    def add_node(self, resource: str) -> psutil.Process:
        """Start a second raylet without cores, with one of `resource`; return its process."""
        before = {process.pid for process in self.processes.of("raylet")}
        options = ["--num-cpus=0", f'--resources={{"{resource}": 1}}', "--object-store-memory=200000000", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={self.gcs_address()}", *options]
        with (self._folder / "node.log").open("wb") as log:
            node = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **self._environment()})
        self._nodes.append(node)
        self.eventually(lambda: len(self.processes.of("raylet")) > len(before), "a second raylet runs")
        return next(process for process in self.processes.of("raylet") if process.pid not in before)

    def interfere(self, orders: Orders) -> None:
        """Let the orders hold in every Python process, until the next ones."""
        orders.write(self._orders_path)

    @property
    def has_own_shared_memory(self) -> bool:
        """True if its /dev/shm is not the machine's."""
        return self.shared_memory.stat().st_dev != Path("/dev/shm").stat().st_dev

    @property
    def shared_memory(self) -> Path:
        """The application's /dev/shm, which is its own."""
        assert self._application is not None
        return Path(f"/proc/{self._application.pid}/root/dev/shm")

    def generates(self) -> bool:
        """True if a request for a few tokens is answered."""
        body = {"model": MODEL, "prompt": "def f", "max_tokens": 4}
        try:
            return httpx.post(f"{self.base_url}/v1/completions", json=body, timeout=30.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def await_rest(self) -> None:
        """Return when no process has started or ended for `REST_S`, and exactly one HAProxy runs.

        Raises:
            TimeoutError: it has not come to rest within `REST_TIMEOUT_S`.
        """
        seen, since_s = self.processes.at_work(), time.monotonic()

        def is_at_rest() -> bool:
            nonlocal seen, since_s
            now = self.processes.at_work()
            if now != seen:
                seen, since_s = now, time.monotonic()
            return time.monotonic() - since_s > REST_S and sum(kind == "HAProxy" for _, kind in now) == 1

        self.eventually(is_at_rest, "no process comes or goes, and one HAProxy runs", REST_TIMEOUT_S)

    def eventually(self, is_so: Callable[[], bool], what: str, timeout_s: float = RECOVERY_TIMEOUT_S) -> None:
        """Wait until something becomes true.

        Raises:
            TimeoutError: it has not, within the time.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(POLL_S)


def _wrapper() -> tuple[str, ...]:
    """Return a command prefix that gives a command its own /dev/shm, so that filling it harms no other program."""
    command = ("unshare", "--mount", "sh", "-c", _MOUNT, "sh")
    can = subprocess.run([*command, "true"], check=False, capture_output=True).returncode == 0
    return command if can else ()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _put_deployment(dashboard: str, deployment: dict[str, Any]) -> None:
    """Hand a deployment to Serve by Ray's dashboard, as `serve deploy` does, with paths that hold in any folder."""
    request = urllib.request.Request(
        f"http://{dashboard}/api/serve/applications/",
        data=json.dumps(with_absolute_paths(deployment)).encode(),
        headers={"Content-Type": "application/json", **get_auth_headers_if_auth_enabled({})},
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S):
        pass


def _answers(address: str) -> bool:
    try:
        _get(address, "/api/version")
    except (urllib.error.URLError, OSError, ValueError):
        return False
    return True


def _is_running(address: str) -> bool:
    try:
        application = _get(address, "/api/serve/applications/")["applications"].get("outrider", {})
    except (urllib.error.URLError, OSError, ValueError):
        return False
    deployments = application.get("deployments", {}).values()
    return application.get("status") == "RUNNING" and all(each["status"] == "HEALTHY" for each in deployments)


def _get(address: str, path: str) -> Any:
    request = urllib.request.Request(f"http://{address}{path}", headers=get_auth_headers_if_auth_enabled({}))
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)

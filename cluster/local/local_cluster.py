"""A Ray cluster of this machine alone, started for one deployment and stopped with it."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import psutil
import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve._private.api import serve_start
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.schema import ServeDeploySchema

from cluster.deploy_file import DeployFile, with_absolute_paths
from cluster.local import check_file_limit, private_files
from cluster.local.serve_environment import haproxy_files, set_variables, tls_variables
from cluster.schema.replicas import IngressSection
from cluster.topology import order_devices
from protos.errors import ConfigError
from protos.linux import wait_for_cores

_PROJECT = Path(__file__).resolve().parents[2]
_OWNER = "owner"
_FOLDERS, _PREFIX = Path("/tmp"), "outray-"  # short, whatever TMPDIR is: HAProxy takes 97 bytes of a socket's path


class LocalCluster:
    """The cluster: `start`, `deploy`, `wait_running`, `stop`. `stop` may be called twice, and during a start."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._owner: IO[bytes] | None = None

    def start(
        self,
        num_cpus: int | None = None,
        ingress: IngressSection = IngressSection(),
        gpus_per_pair: int | None = None,
        *,
        has_dashboard: bool = False,
    ) -> None:
        """Start Ray with Serve's fast path and `num_cpus` cores, all by default; other clusters are left alone.

        The cluster keeps `ingress`'s TLS files until it stops. Ray assigns GPUs in an order that gives each pair
        `gpus_per_pair` GPUs joined by NVLink. The dashboard (nine processes) is for other terminals; nothing here needs
        it. Ray puts the current folder first on its processes' path, where a user's `engine` or `models` would hide
        ours; so they start in an empty folder. All processes, this one too, yield cores to the threads that compute.
        """
        check_file_limit()
        set_variables()
        os.environ.update({**tls_variables(ingress), **order_devices(gpus_per_pair)})
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PROJECT), os.environ.get("PYTHONPATH")]))
        end_leftovers()
        self._folder = TemporaryDirectory(prefix=_PREFIX, dir=_FOLDERS, ignore_cleanup_errors=True)
        self._owner = own(Path(self._folder.name))
        os.environ.update(haproxy_files(self._folder.name))
        wait_for_cores()
        with chdir(self._folder.name), private_files():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                namespace="serve",
                include_dashboard=has_dashboard,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        _end_monitors()

    def deploy(self, file: DeployFile) -> None:
        """Pass the configuration to Serve, as `serve deploy` does, with absolute paths.

        Raises:
            ConfigError: Serve refused it.
        """
        try:
            config = ServeDeploySchema.model_validate(with_absolute_paths(file.deployment))
            client = serve_start(
                http_options=config.http_options.model_dump(),
                grpc_options=config.grpc_options.model_dump(),
                global_logging_config=config.logging_config,
                controller_options=config.controller_options,
                proxy_location=config.proxy_location,
            )
            running = ray.get(client._controller.get_grpc_config.remote())
            refuse_changed_address(client.http_config, running, config)
            client.deploy_apps(config)
        except (ValueError, RayTaskError) as error:
            raise ConfigError(f"Serve refused the deployment: {error}") from None

    def wait_running(self, on_wait: Callable[[str], None]) -> None:
        """Return when every replica serves; twice a second call `on_wait` with the deployments that do not, and why.

        Raises:
            ConfigError: the deployment failed, with Serve's reason.
        """
        while (waiting := _waiting()) is not None:
            on_wait(waiting)
            time.sleep(0.5)

    def undeploy(self) -> None:
        """Let running requests finish, then remove the application; the cluster stays for the next one."""
        for name in serve.status().applications:
            serve.delete(name, _blocking=False)  # it would wait for a minute at most
        while serve.status().applications:
            time.sleep(0.5)

    def stop(self) -> None:
        """Let running requests finish, then stop everything; Serve ends with its cluster."""
        if ray.is_initialized():
            self.undeploy()
        self.kill()

    def kill(self) -> None:
        """Stop everything now."""
        ray.shutdown()
        if self._folder is not None:
            _end_processes(self._folder.name)
            self._folder.cleanup()
        if self._owner is not None:
            self._owner.close()


def _waiting() -> str | None:
    """Return the deployments that do not serve yet, and Serve's reason; None if all serve. Raises ConfigError."""
    application = next(iter(serve.status().applications.values()), None)
    if application is None:
        return "the application"
    status = application.status.value
    if status == "RUNNING":
        return None
    waiting = {name: each.message for name, each in application.deployments.items() if each.status.value != "HEALTHY"}
    messages = [application.message, *(f"{name}: {message}" for name, message in waiting.items() if message)]
    message = "\n".join(filter(None, messages))
    if status in ("DEPLOY_FAILED", "UNHEALTHY"):
        raise ConfigError(f"the deployment failed: {_reason(message)}")
    reason = message.partition("\n")[0]
    return f"{' and '.join(waiting) or 'the application'}{': ' if reason else ''}{reason}"


def refuse_changed_address(http: HTTPOptions, grpc: gRPCOptions, wanted: ServeDeploySchema) -> None:
    """Raise ConfigError for settings that Serve's running proxies would ignore."""
    for section, running, keys in (
        ("http_options", http, ("host", "port")),
        ("grpc_options", grpc, ("port", "grpc_servicer_functions", "enable_reflection")),
    ):
        for key in keys:
            now, then = getattr(running, key), getattr(getattr(wanted, section), key)
            if now != then:
                raise ConfigError(
                    f"{section}.{key} is {then!r}, and Serve runs with {now!r} until it is shut down; stop it and "
                    "start it again, or leave it as it is"
                )


def logs_folder() -> Path:
    """Return the folder of the logs of this process's cluster."""
    node = ray._private.worker.global_worker.node
    assert node is not None, "this process has started it"
    return Path(node.get_logs_dir_path())


def _end_monitors() -> None:
    """End two monitors of this driver's cluster that nothing uses; they take memory and 1% of a core.

    The log monitor sends workers' output to drivers, and ours do not print it. The autoscaler's monitor has no nodes
    to start here. `ray.init` has no setting to leave them out.
    """
    node = ray._private.worker.global_worker.node
    assert node is not None, "this process has started it"
    for end in (node.kill_log_monitor, node.kill_monitor):
        end(check_alive=False)


def own(folder: Path) -> IO[bytes]:
    """Mark a folder as used until the returned file is closed or this process ends."""
    owner = (folder / _OWNER).open("wb")
    fcntl.flock(owner, fcntl.LOCK_EX)
    return owner


def end_leftovers() -> None:
    """Remove leftovers of clusters whose own process was killed: HAProxy, and the folders."""
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        if _is_abandoned(folder):
            _end_processes(str(folder))
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """True if a folder is this user's, and no process holds its lock.

    A process id would not do: containers may share the folders, and ids are used again. A folder that is being made has
    no lock and is empty. One without a lock that has files was removed while a process of its cluster was ending.
    """
    lock = folder / _OWNER
    try:
        if folder.lstat().st_uid != os.getuid():
            return False
        if not lock.exists():
            return any(folder.iterdir())
        with lock.open("rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except OSError:  # locked, or gone
        return False


def _end_processes(folder: str) -> None:
    """Kill each HAProxy whose configuration is in the folder: HAProxy outlives its manager."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if "haproxy" in words[0] and any(folder in word for word in words):
            with suppress(psutil.Error):
                process.kill()


def _reason(message: str) -> str:
    """Return our own error from Serve's message, without the sentence or the stack traces before it."""
    _, _, reason = message.rpartition("\nprotos.errors.")
    return reason.partition(" failed with exception:\n")[2] or reason

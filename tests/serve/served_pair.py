"""A served tiny pair as its tests see it from outside: HTTP, metrics, logs and process ids."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from ray import serve

from cluster.deploy_file import VLLM_SERVICER_FUNCTION, DeployFile, read_deploy_file
from cluster.local.local_cluster import LocalCluster
from cluster.local.serve_environment import free_port as free_port  # for the tests in this folder

MODEL = "tiny"
BUNDLED = Path(__file__).parents[2] / "deploy.yaml"


@dataclass
class Stream:
    """The result of one streamed completion."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    speculation: dict[str, Any] = field(default_factory=dict)


class ServedPair:
    """The running application, reached over HTTP and by the process ids of its actors."""

    def __init__(self, cluster: LocalCluster, file: DeployFile) -> None:
        self.cluster = cluster
        self.file = file
        self.url = f"http://{file.http_host}:{file.http_port}"
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=170.0)

    def stream(self, on_tokens: Callable[[int], None] = lambda number: None, **options: Any) -> Stream:
        """Stream a completion to its end; `on_tokens` is called after every chunk with the number of tokens so far."""
        extra = {"ignore_eos": True, "return_token_ids": True, **options.pop("extra_body", {})}
        request = {"model": MODEL, "prompt": "hello world", "max_tokens": 64, "seed": 4, **options}
        answer = Stream()
        for chunk in self.client.completions.create(stream=True, extra_body=extra, **request):
            for choice in chunk.choices:
                answer.token_ids += getattr(choice, "token_ids", None) or []
                answer.finish_reason = choice.finish_reason or answer.finish_reason
            metrics = getattr(chunk, "metrics", None)
            answer.speculation = metrics["speculative_decoding"] if metrics else answer.speculation
            on_tokens(len(answer.token_ids))
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over its samples with these labels, as `/metrics` has it now."""
        return sum(sample.value for sample in self._samples(name) if labels.items() <= sample.labels.items())

    def by_replica(self, name: str) -> dict[str, float]:
        """Return a metric of each pair."""
        return {sample.labels["replica"]: sample.value for sample in self._samples(name)}

    def _samples(self, name: str) -> list[Sample]:
        text = httpx.get(f"{self.url}/metrics", timeout=30.0, verify=False).text  # no certificates, read for each call
        text = "".join(line for line in text.splitlines(keepends=True) if name in line)  # parsing all takes long
        families = (family for family in text_string_to_metric_families(text) if family.name == name)
        return [sample for family in families for sample in family.samples]

    def logs(self) -> str:
        """Return the logs of this cluster's processes on this machine."""
        return cluster_logs()

    def kill(self, actor: str) -> None:
        """SIGKILL the one process of `actor`."""
        (process,) = processes(actor)
        process.kill()


def cluster_logs() -> str:
    """Return the logs of the workers of this test's cluster."""
    folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    return "\n".join(file.read_text(errors="replace") for file in folder.glob("worker-*.err"))


def processes(actor: str) -> list[psutil.Process]:
    """Return the processes of this test's cluster that Ray has titled with the actor's class."""
    return [each for each in psutil.Process().children(recursive=True) if title(each).startswith(f"ray::{actor}")]


def title(process: psutil.Process) -> str:
    """Return the title of a process; while a method runs, its name follows the actor's."""
    try:
        return "".join(process.cmdline()[:1])
    except psutil.Error:  # it has just ended
        return ""


def once(number: int, action: Callable[[], None]) -> Callable[[int], None]:
    """Return a function of a growing count that calls `action` when the count first reaches `number`."""
    has_acted = False

    def check(count: int) -> None:
        nonlocal has_acted
        if count >= number and not has_acted:
            has_acted = True
            action()

    return check


def eventually(is_so: Callable[[], bool], timeout_s: float = 180.0) -> None:
    """Wait until a condition is true, checking ever more rarely: the awaited work needs the same cores."""
    deadline_s, pause_s = time.monotonic() + timeout_s, 0.1
    while not is_so():
        assert time.monotonic() < deadline_s, f"not so after {timeout_s} s"
        time.sleep(pause_s)
        pause_s = min(1.0, 1.3 * pause_s)


class SharedCluster:
    """One cluster for the applications of all tests, one after the other: each start takes half a minute.

    Args:
        local: the cluster, not started.
        home: its working folder.
    """

    def __init__(self, local: LocalCluster, home: Path) -> None:
        self.local = local
        self.ports = (free_port(), free_port())  # HTTP, gRPC: Serve keeps the ports of its first application
        self._home = home
        self._served: ServedPair | None = None

    def start(self) -> None:
        with chdir(self._home):
            self.local.start(num_cpus=3)

    def serve(self, folder: Path, **changes: Any) -> ServedPair:
        """Serve the pair in `folder`, with `changes` to the bundled deploy.yaml's args, unless it is what runs.

        A cluster that a test has stopped is started again.
        """
        file = write_deploy_file(folder, self.ports, **changes)
        if not ray.is_initialized():
            self.start()
        if self._served is not None and self._served.file == file and serve.status().applications:
            return self._served
        self.local.undeploy()
        _kill_index()
        self.local.deploy(file)
        self.local.wait_running(lambda status: None)
        self._served = ServedPair(self.local, file)
        return self._served


def _kill_index() -> None:
    """Kill the index actor, which would outlive its application by half a minute and keep the old pairs."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["name"].startswith("outrider-index"):
            ray.kill(ray.get_actor(**each))


def write_deploy_file(folder: Path, ports: tuple[int, int], **changes: Any) -> DeployFile:
    """Return the bundled deploy.yaml with the tiny pair, these ports, `changes` to its args, and a fast shutdown."""
    file = read_deploy_file(BUNDLED)
    deployment = dict(file.deployment)
    deployment["http_options"] = {"host": "127.0.0.1", "port": ports[0]}
    functions = [*deployment["grpc_options"]["grpc_servicer_functions"], VLLM_SERVICER_FUNCTION]
    deployment["grpc_options"] = {
        **deployment["grpc_options"],
        "port": ports[1],
        "grpc_servicer_functions": functions,
    }
    args = {
        "model_id": MODEL,
        "target": {"path": str(folder / "target"), "dtype": "float32", "num_threads": 1},
        "draft": {"kind": "model", "path": str(folder / "draft"), "dtype": "float32", "num_threads": 1},
        "speculation": {"adaptive": False},  # so small a target gains nothing by its draft
        "cache": {"num_blocks": 512},
        "ingress": {"open_admin": True},
        **changes,
    }
    overrides = [{"name": "Pair", "graceful_shutdown_timeout_s": 1.0}]  # streams move, they do not end there
    deployment["applications"] = [{**deployment["applications"][0], "args": args, "deployments": overrides}]
    return DeployFile(deployment, "127.0.0.1", ports[0], ports[1], file.config)

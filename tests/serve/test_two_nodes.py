"""The pair on one node, prefill on another: blocks cross between them, and the second node is killed under load."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.local.local_cluster import LocalCluster
from cluster.local.serve_environment import set_variables
from protos.errors import ConfigError
from tests.serve.prefill.test_prefill import PREFILL, PROMPT_TOKENS, failures, texts
from tests.serve.served_pair import (
    ServedPair,
    SharedCluster,
    cluster_logs,
    eventually,
    free_port,
    processes,
    write_deploy_file,
)
from tests.serve.tiny_models import write_pair

NODE = "prefill_node"
GPUS = {"count": 2, "kind": "H100"}


class TwoNodes(LocalCluster):
    """A head node with cores, and a second raylet without: only deployments that ask for `NODE` run there."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._cluster: Cluster | None = None
        self.home = home

    def start(self, num_cpus: int | None = None) -> None:
        set_variables()
        with mock.patch.dict(os.environ, HOME=str(self.home)):
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": num_cpus, "include_dashboard": True, "dashboard_port": free_port()},
            )
        self._second: Any = self._cluster.add_node(num_cpus=0, resources={NODE: 1})
        ray.init(address=self._cluster.address, namespace="serve", log_to_driver=False)

    def add_gpu_node(self) -> None:
        """Add a node that claims to have two GPUs; no process can compute on them."""
        assert self._cluster is not None
        self._cluster.add_node(num_cpus=2, num_gpus=2, resources={"accelerator_type:H100": 1})

    @contextmanager
    def node_without_files(self, home: Path) -> Iterator[None]:
        """Add a node whose user has another home."""
        assert self._cluster is not None
        with mock.patch.dict(os.environ, HOME=str(home)):
            node = self._cluster.add_node(num_cpus=2)
        yield
        self._cluster.remove_node(node)

    def kill_second_node(self) -> None:
        assert self._cluster is not None
        self._cluster.remove_node(self._second, allow_graceful=False)

    def stop(self) -> None:
        super().stop()
        if self._cluster is not None:
            self._cluster.shutdown()


@dataclass(frozen=True, slots=True)
class Served:
    pair: ServedPair
    nodes: TwoNodes


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    nodes = TwoNodes(tmp_path_factory.mktemp("files"))
    nodes.stop()  # the cluster that the tests before this one may have shared
    try:
        nodes.start(num_cpus=2)
        yield SharedCluster(nodes, tmp_path_factory.mktemp("home"))
    finally:
        nodes.stop()


@pytest.fixture
def served(nodes: SharedCluster, tmp_path: Path) -> Iterator[Served]:
    write_pair(tmp_path)
    file = write_deploy_file(tmp_path, nodes.ports, prefill=PREFILL, cache={"num_blocks": 2048})
    file.deployment["proxy_location"] = "HeadOnly"  # both nodes are this machine, and one port is enough
    file.deployment["applications"][0]["deployments"] = [
        {"name": "Prefill", "ray_actor_options": {"num_cpus": 0, "resources": {NODE: 1}}}
    ]
    nodes.local.deploy(file)
    nodes.local.wait_running(lambda status: None)
    yield Served(ServedPair(nodes.local, file), nodes.local)
    nodes.local.undeploy()


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_killed_prefill_node_costs_no_token(served: Served) -> None:
    pair = served.pair
    expected = texts(pair, "expected", num=8)
    assert pair.metric("outrider_prefill_remote_tokens") >= PROMPT_TOKENS - 16
    assert not any(failures(pair).values()), "every block computed there has arrived"
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.extend(texts(pair, "killed", num=8)))
    asking.start()
    eventually(lambda: pair.metric("outrider_prefill_num_requests_fetching") > 0 or not asking.is_alive())
    served.nodes.kill_second_node()
    asking.join()
    assert answers == expected
    assert texts(pair, "without", num=8) == expected


@pytest.mark.ray
def test_the_dashboard_takes_no_call_without_the_token(nodes: SharedCluster) -> None:
    """Here, because the other tests' cluster has none."""
    url = f"http://{ray._private.worker.global_worker.node.webui_url}/api/serve/applications/"  # type: ignore[attr-defined]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=10)
    assert refused.value.code == 401


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_node_without_the_model_is_named_before_anything_is_started(nodes: SharedCluster, tmp_path: Path) -> None:
    write_pair(nodes.local.home)
    file = write_deploy_file(tmp_path, nodes.ports, target={"path": "~/target"}, draft={"kind": "none"})
    file.deployment["proxy_location"] = "HeadOnly"
    reason = r"on node .*: model path '~/target' is neither"
    with nodes.local.node_without_files(tmp_path / "empty"):
        nodes.local.deploy(file)
        with pytest.raises(ConfigError, match=reason):
            nodes.local.wait_running(lambda status: None)
    assert not processes("Pair")
    nodes.local.undeploy()


@pytest.fixture
def waiting(nodes: SharedCluster, tmp_path: Path) -> Iterator[TwoNodes]:
    """A pair that demands GPUs, on a cluster that has none."""
    write_pair(tmp_path)
    file = write_deploy_file(tmp_path, nodes.ports, pair={"num_replicas": 1, "gpus": GPUS})
    file.deployment["proxy_location"] = "HeadOnly"
    nodes.local.deploy(file)
    yield nodes.local
    nodes.local.undeploy()


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_pair_waits_for_a_node_with_its_gpus_and_takes_them(waiting: TwoNodes) -> None:
    eventually(lambda: "PENDING" in group_states())
    assert "1 of 1 pairs wait for nodes" in cluster_logs()
    assert not processes("Pair")
    waiting.add_gpu_node()
    eventually(lambda: "CREATED" in group_states())


def group_states() -> list[str]:
    """States of the placement groups with GPUs."""
    groups = ray.util.placement_group_table().values()
    return [each["state"] for each in groups if any("GPU" in bundle for bundle in each["bundles"].values())]

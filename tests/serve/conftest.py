"""One cluster with one tiny pair for all tests of the served application."""

from collections.abc import Iterator

import pytest

from cluster.local_cluster import LocalCluster
from tests.serve.served_pair import ServedPair, free_port, write_deploy_file
from tests.serve.tiny_models import write_pair


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPair]:
    folder = tmp_path_factory.mktemp("tiny")
    write_pair(folder)
    file = write_deploy_file(folder, (free_port(), free_port()))
    cluster = LocalCluster()
    try:
        cluster.start(num_cpus=2)
        cluster.deploy(file)
        cluster.wait_running(lambda status: None)
        yield ServedPair(cluster, file)
    finally:
        cluster.stop()

"""One cluster for all tests of served applications, and the application with the tiny pair."""

from collections.abc import Iterator

import pytest

from cluster.local_cluster import LocalCluster
from tests.serve.served_pair import ServedPair, SharedCluster, free_port
from tests.serve.tiny_models import write_pair

STEPS = {"judge": "likelihood", "think": None, "step_end": ".", "max_step_tokens": 12}  # for requests that ask


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    """The cluster, started where a user has packages of our names."""
    local, home = LocalCluster(), tmp_path_factory.mktemp("home")
    for name in ("engine", "models", "cluster"):
        (home / name).mkdir()
        (home / name / "__init__.py").write_text("raise SystemExit('a package of the user')")
    shared = SharedCluster(local, (free_port(), free_port()), home)
    try:
        shared.start()
        yield shared
    finally:
        local.stop()


@pytest.fixture(scope="module")
def served(cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPair]:
    folder = tmp_path_factory.mktemp("tiny")
    write_pair(folder)
    with cluster.serving(folder, speculation={"adaptive": False, "steps": STEPS}) as served_pair:
        yield served_pair

"""One cluster for all tests of served applications, and the application with the tiny pair.

An application runs until a file asks for another one: files that share one follow each other.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local.local_cluster import LocalCluster
from tests.serve.served_pair import ServedPair, SharedCluster
from tests.serve.tiny_models import write_pair

STEPS = {"judge": "likelihood"}  # for requests that ask


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    """The cluster, started where a user has packages of our names."""
    local, home = LocalCluster(), tmp_path_factory.mktemp("home")
    for name in ("engine", "models", "cluster"):
        (home / name).mkdir()
        (home / name / "__init__.py").write_text("raise SystemExit('a package of the user')")
    shared = SharedCluster(local, home)
    try:
        shared.start()
        yield shared
    finally:
        local.stop()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny pair; no test writes to it."""
    folder = tmp_path_factory.mktemp("tiny")
    write_pair(folder)
    return folder


@pytest.fixture(scope="module")
def served(cluster: SharedCluster, tiny_pair: Path) -> ServedPair:
    return cluster.serve(tiny_pair, speculation={"adaptive": False, "steps": STEPS})

"""Two clusters on one machine keep out of each other's way."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from cluster.local import serve_environment
from cluster.local.serve_environment import cluster_variables, set_variables

FIRST, LAST = "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", kept)


@pytest.fixture
def other_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The gRPC port of another cluster's replica; one more row of ports is free."""
    two_rows = serve_environment.free_ports(208)
    monkeypatch.setattr(serve_environment, "_OURS", two_rows)
    monkeypatch.setattr(serve_environment.random, "sample", lambda rows, count: list(rows))
    with socket.socket() as replica:
        replica.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does: a second one may listen there
        replica.bind(("0.0.0.0", two_rows[5]))
        replica.listen()
        yield two_rows[5]


def test_replicas_listen_for_grpc_where_no_other_cluster_does(other_cluster: int) -> None:
    set_variables()
    chosen = range(int(os.environ[FIRST]), int(os.environ[LAST]) + 1)
    assert len(chosen) == 100
    assert other_cluster not in chosen


def test_no_port_is_the_one_that_every_cluster_has() -> None:
    set_variables()
    ports_ = [int(value) for name, value in os.environ.items() if name.startswith("RAY_SERVE_") and "_PORT" in name]
    assert len(set(ports_)) == len(ports_) == 6
    assert all(20_000 <= port < 30_000 for port in ports_)
    replicas = range(int(os.environ[FIRST]), int(os.environ[LAST]) + 1)
    assert sum(port in replicas for port in ports_) == 2  # the first and the last: none is a proxy's


def test_an_operator_s_own_ports_are_kept() -> None:
    os.environ[FIRST] = "41000"
    set_variables()
    assert os.environ[FIRST] == "41000"
    assert LAST not in os.environ


def test_the_address_of_another_cluster_is_not_asked() -> None:
    os.environ["RAY_ADDRESS"] = "10.0.0.1:6379"
    set_variables()
    assert "RAY_ADDRESS" not in os.environ


def test_calls_between_replicas_take_no_proxy() -> None:
    """By an address of this machine, which no `no_proxy` of the user's names."""
    os.environ.update(http_proxy="http://127.0.0.1:9", grpc_proxy="http://127.0.0.1:9")
    set_variables()
    assert dict(os.environ)["grpc_proxy"] == cluster_variables()["grpc_proxy"] == ""

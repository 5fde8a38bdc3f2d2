"""Taken ports and short memory are told before anything is started."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import DeployConfig, parse_config
from cluster.deploy_file import DeployFile
from cluster.ports import free_port
from cluster.preflight import check_memory, check_ports
from protos.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def config(model: Path) -> DeployConfig:
    return parse_config({"model_id": "m", "target": {"path": str(model)}, "cache": {"memory_gib": 0.01}})


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_named_with_its_key(config: DeployConfig, taken_port: int):
    file = DeployFile({}, "127.0.0.1", free_port(), None, config)
    check_ports(file)
    with pytest.raises(ConfigError, match=rf"port {taken_port} is taken by .*change http_options.port"):
        check_ports(replace(file, http_port=taken_port))
    with pytest.raises(ConfigError, match="change grpc_options"):
        check_ports(replace(file, grpc_port=taken_port))


def test_a_port_or_host_that_cannot_be_had_is_refused(config: DeployConfig):
    file = DeployFile({}, "127.0.0.1", free_port(), None, config)
    with pytest.raises(ConfigError, match=r"http_options.port is 99999; it must be 1 to 65535"):
        check_ports(replace(file, http_port=99_999))
    with pytest.raises(ConfigError, match="both"):
        check_ports(replace(file, grpc_port=file.http_port))
    with pytest.raises(ConfigError, match=r"host '192.0.2.99' is no address of this machine"):
        check_ports(replace(file, http_host="192.0.2.99"))


def test_a_deployment_that_fits_passes(config: DeployConfig):
    check_memory(config)


def test_a_cache_larger_than_the_machine_is_refused_with_both_figures(config: DeployConfig):
    huge = config.model_copy(update={"cache": config.cache.model_copy(update={"memory_gib": 1e6})})
    with pytest.raises(ConfigError, match=r"about 10000\d\d\.\d GiB of memory are needed and .* GiB are available"):
        check_memory(huge)


def test_weights_count_per_replica(config: DeployConfig, model: Path):
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(ConfigError, match="are needed"):
        check_memory(config)

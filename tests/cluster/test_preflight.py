"""Taken ports and short memory are reported before anything is started."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.app import build
from cluster.config import DeployConfig, parse_config
from cluster.deploy_file import DeployFile
from cluster.local.serve_environment import free_port
from cluster.node_check import check_room
from cluster.preflight import (
    check_certificates,
    check_driver,
    check_log,
    check_logs_folders,
    check_memory,
    check_ports,
)
from cluster.schema.replicas import IngressSection
from cluster.topology import Device, NodeTopology, read_topology
from protos.errors import ConfigError
from tests.cluster.recorded_nvml import RecordedNvml

NO_GPU = NodeTopology()
H100S = NodeTopology(tuple(Device(index, "H100", 85_520_809_984) for index in range(8)), cuda_version=(13, 0))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
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
    check_ports(replace(file, http_host="127.0.0.2", grpc_port=taken_port))  # both frontends listen there


def test_a_host_that_cannot_be_had_is_refused(config: DeployConfig):
    file = DeployFile({}, "127.0.0.1", free_port(), None, config)
    with pytest.raises(ConfigError, match=r"host '192.0.2.99' is no address of this machine"):
        check_ports(replace(file, http_host="192.0.2.99"))


def test_a_deployment_that_fits_passes(config: DeployConfig):
    check_memory(config, NO_GPU)


def test_a_cache_larger_than_the_machine_is_refused_with_both_figures(config: DeployConfig):
    huge = config.model_copy(update={"cache": config.cache.model_copy(update={"memory_gib": 1e6})})
    with pytest.raises(ConfigError, match=r"about 10000\d\d\.\d GiB of memory are needed and .* GiB are available"):
        check_memory(huge, NO_GPU)


def test_weights_count_per_replica(config: DeployConfig, model: Path):
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(ConfigError, match="are needed"):
        check_memory(config, NO_GPU)


def test_quantized_weights_count_as_they_are_served(model: Path):
    """16 GiB of bfloat16, an 8 B model, in int4: neither the whole of it nor float32 of it is ever in memory."""
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(16 << 30)
    target = {"path": str(model), "quantization": "int4"}
    args = {"model_id": "m", "target": target, "draft": {"kind": "none"}, "cache": {"memory_gib": 0.5}}
    with patch("psutil.virtual_memory", lambda: SimpleNamespace(available=12 << 30)):
        check_memory(parse_config(args), NO_GPU)
        with pytest.raises(ConfigError, match=r"about 34.* GiB of memory are needed"):
            check_memory(parse_config({**args, "target": {"path": str(model)}}), NO_GPU)


def sharded(model: Path, gib: int, num_ranks: int, **cache: float) -> DeployConfig:
    """A target of so many GiB, in a file that takes no room."""
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(gib << 30)
    target = {"path": str(model), "tensor_parallel_size": num_ranks}
    return parse_config({"model_id": "m", "target": target, "cache": cache})


def test_weights_on_gpus_are_one_checkpoint_of_main_memory_and_a_rank_has_its_part(model: Path):
    with patch("psutil.virtual_memory", lambda: SimpleNamespace(available=200 << 30)):
        check_memory(sharded(model, 140, 4), H100S)  # whose ranks map the same files
        with pytest.raises(ConfigError, match=r"about 112\d\.\d GiB of memory are needed and 200.0"):
            check_memory(sharded(model, 140, 4), NO_GPU)


def test_weights_or_a_pool_that_no_gpu_holds_are_refused_with_the_figures(model: Path):
    with pytest.raises(ConfigError, match=r"141\.0 GiB \(weights 140\.0.*0\.90.*smallest one's 79\.6 GiB are 71\.7"):
        check_memory(sharded(model, 140, 1), H100S)
    with pytest.raises(ConfigError, match=r"weights 16\.0, KV pool 60\.0.*lower cache\.memory_gib"):
        check_memory(sharded(model, 16, 1, memory_gib=60), H100S)


def with_draft(model: Path, gib: int, num_pairs: int = 1, **draft: object) -> DeployConfig:
    """A target of one rank and 40 GiB, and a draft model of so many."""
    folder = model.parent / "draft"
    folder.mkdir(exist_ok=True)
    shutil.copy(model / "config.json", folder)
    for path, size in ((model, 40), (folder, gib)):
        with (path / "model.safetensors").open("wb") as file:
            file.truncate(size << 30)
    args = {"path": str(folder), "kind": "model", **draft}
    pair = {"num_replicas": num_pairs}
    return parse_config({"model_id": "m", "target": {"path": str(model)}, "draft": args, "pair": pair})


@pytest.fixture
def much_memory() -> Iterator[None]:
    with patch("psutil.virtual_memory", lambda: SimpleNamespace(available=2 << 40)):
        yield


@pytest.mark.usefixtures("much_memory")
def test_a_draft_counts_where_it_shares_the_targets_gpu_and_on_its_own_one(model: Path):
    check_memory(with_draft(model, 40), H100S)  # each has a GPU
    with pytest.raises(ConfigError, match=r"each GPU of a pair needs about 81\.0 GiB \(weights 40\.0, draft 40\.0"):
        check_memory(with_draft(model, 40, gpu=0), H100S)
    with pytest.raises(ConfigError, match=r"weights 40\.0, draft 40\.0"):
        check_memory(with_draft(model, 40, num_pairs=8), H100S)  # eight GPUs, one for each pair
    with pytest.raises(ConfigError, match=r"the draft's GPU needs about 81\.0 GiB \(weights 80\.0"):
        check_memory(with_draft(model, 80, gpu="own"), H100S)


@pytest.mark.usefixtures("much_memory")
def test_only_gpus_that_are_visible_count_in_their_order(model: Path, monkeypatch: pytest.MonkeyPatch):
    small, large = Device(0, "small", 8 << 30, "GPU-a"), Device(1, "large", 96 << 30, "GPU-b")
    topology = NodeTopology((small, large))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"each GPU of a target .* smallest one's 8\.0 GiB"):
        check_memory(with_draft(model, 4), topology)
    for visible in ("1", "GPU-b", "1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        check_memory(with_draft(model, 4), topology)


@pytest.mark.usefixtures("much_memory")
def test_an_instance_of_a_divided_gpu_has_its_own_memory(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    divided = read_topology(RecordedNvml("divided"))
    name, memory_bytes = next(iter(divided.devices[0].instances.items()))
    assert memory_bytes < divided.devices[0].memory_bytes
    gib = memory_bytes >> 30
    for visible in (None, name):
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ConfigError, match=rf"smallest one's {gib}\.\d GiB"):
            check_memory(sharded(model, gib, 1), divided)


def test_a_driver_older_than_torchs_cuda_is_refused_and_any_newer_one_is_not():
    old = read_topology(RecordedNvml("divided"))
    with pytest.raises(ConfigError, match=r"CUDA up to 12\.4, and torch 2\.11\.0\+cu130 needs 13\.0 or later"):
        check_driver(old, "2.11.0+cu130")
    check_driver(old, "2.11.0+cu121")
    check_driver(H100S, "2.11.0+cu130")
    check_driver(NO_GPU, "2.11.0+cu130")


def test_a_driver_that_is_too_old_is_refused_before_anything_starts(model: Path, monkeypatch: pytest.MonkeyPatch):
    """By `outrider serve` here, and by `serve deploy` where the application is built."""
    old = read_topology(RecordedNvml("divided"))
    monkeypatch.setattr("cluster.preflight.version", lambda name: "2.11.0+cu130")
    monkeypatch.setattr("cluster.app.read_topology", lambda: old)
    with pytest.raises(ConfigError, match=r"CUDA up to 12\.4, and torch 2\.11\.0\+cu130"):
        check_memory(sharded(model, 16, 1), old)
    save_file({"weight": np.zeros(4)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"CUDA up to 12\.4, and torch 2\.11\.0\+cu130"):
        build({"model_id": "m", "target": {"path": str(model)}})


def test_a_log_needs_a_folder_and_room(model: Path, tmp_path: Path):
    def check(**tune: object) -> None:
        check_log(parse_config({"model_id": "m", "target": {"path": str(model)}, "tune": tune}))

    check()
    check(log=str(tmp_path / "new" / "log"))
    assert (tmp_path / "new" / "log").is_dir()
    usage = SimpleNamespace(free=1 << 29)
    with (
        patch("shutil.disk_usage", lambda folder: usage),
        pytest.raises(ConfigError, match=r"has 0\.50 GiB for it, and the log grows to 1 GiB; free some"),
    ):
        check(log=str(tmp_path / "new" / "log"))
    with pytest.raises(ConfigError, match=r"tune.log .* cannot be used"):
        check(log=str(model / "config.json" / "below"))


def pairs_of(model: Path, gib: float, **sections: object) -> DeployConfig:
    """Pairs on processors whose pool alone is of so many GiB."""
    args = {"model_id": "m", "target": {"path": str(model)}, "cache": {"memory_gib": gib}, **sections}
    return parse_config(args)


def room(name: str, gib: float, num_pairs: int = 1, num_prefills: int = 0) -> tuple[str, int, tuple[int, int]]:
    return name, int(gib * (1 << 30)), (num_pairs, num_prefills)


def test_pairs_fit_if_nodes_have_places_and_memory_for_all_of_them(model: Path):
    """Each takes 4 GiB of pool and 0.9 of processes."""
    three = pairs_of(model, 4, pair={"num_replicas": 3})
    check_room(three, [room("a", 10, num_pairs=2), room("b", 6)], is_on_gpu=False)
    with pytest.raises(ConfigError, match=r"3 pairs .* the 2 nodes for them have 12\.0 GiB, enough for 2 pairs"):
        check_room(three, [room("a", 6, num_pairs=2), room("b", 6)], is_on_gpu=False)
    with pytest.raises(ConfigError, match=r"the 1 nodes for them have 100\.0 GiB, enough for 2 pairs"):
        check_room(three, [room("a", 100, num_pairs=2)], is_on_gpu=False)


def test_a_node_that_may_get_a_pair_and_has_no_memory_for_one_is_named(model: Path):
    with pytest.raises(
        ConfigError, match=r"node b may get a replica of pair, .* 4\.9 GiB .* has 2\.0 .* pair\.resources"
    ):
        check_room(pairs_of(model, 4), [room("a", 100), room("b", 2)], is_on_gpu=False)
    config = pairs_of(model, 8, prefill={"num_replicas": 1})
    rooms = [room("a", 100), room("b", 4, num_pairs=0, num_prefills=1)]
    with pytest.raises(ConfigError, match=r"node b may get a replica of prefill, .* prefill\.resources"):
        check_room(config, rooms, is_on_gpu=False)


def test_of_a_moving_number_the_least_has_to_fit(model: Path):
    scaled = {"autoscaling": {"min_replicas": 1, "max_replicas": 8}}
    check_room(pairs_of(model, 4, pair=scaled), [room("a", 6, num_pairs=8)], is_on_gpu=False)
    scaled["autoscaling"]["min_replicas"] = 2
    with pytest.raises(ConfigError, match="2 pairs"):
        check_room(pairs_of(model, 4, pair=scaled), [room("a", 6, num_pairs=8)], is_on_gpu=False)


def test_all_pairs_of_this_machine_count(model: Path):
    with patch("psutil.virtual_memory", lambda: SimpleNamespace(available=20 << 30)):
        check_memory(pairs_of(model, 4, pair={"num_replicas": 3}), NO_GPU)
        with pytest.raises(ConfigError, match=r"about 21\.1 GiB of memory are needed and 20\.0 GiB"):
            check_memory(pairs_of(model, 4, pair={"num_replicas": 4}), NO_GPU)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are and are not what TLS asks for."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "other"):
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=here"]
        files = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"]
        subprocess.run([*command, *files], check=True, capture_output=True)
    locked = ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", folder / "one.key"]
    (folder / "locked.key").write_bytes(subprocess.run(locked, check=True, capture_output=True).stdout)
    certificate = (folder / "one.crt").read_bytes()
    for name in ("one", "other", "locked"):
        (folder / f"with {name}.pem").write_bytes(certificate + (folder / f"{name}.key").read_bytes())
        (folder / f"with-{name}.pem").write_bytes(certificate + (folder / f"{name}.key").read_bytes())
    (folder / "text").write_text("hello")
    return folder


@pytest.mark.parametrize("name", ["text", "one.crt", "one.key", "with-other.pem", "with-locked.pem", "with one.pem"])
def test_a_certificate_with_which_no_server_starts_is_refused(certificates: Path, name: str):
    check_certificates(IngressSection(tls_certificate_file=str(certificates / "with-one.pem")))
    with pytest.raises(ConfigError, match=r"ingress\.tls_certificate_file '.*' (cannot be used for TLS|has a space)"):
        check_certificates(IngressSection(tls_certificate_file=str(certificates / name)))


@pytest.mark.parametrize("name", ["text", "one.key"])
def test_authorities_that_are_none_are_refused(certificates: Path, name: str):
    good = str(certificates / "with-one.pem")
    check_certificates(IngressSection(tls_certificate_file=good, tls_client_ca_file=str(certificates / "one.crt")))
    with pytest.raises(ConfigError, match=r"ingress\.tls_client_ca_file '.*' cannot be used for TLS"):
        check_certificates(IngressSection(tls_certificate_file=good, tls_client_ca_file=str(certificates / name)))


@pytest.mark.parametrize("folder", ["relative", "/proc/none", "/dev/null/logs", "/dev/null"])
def test_a_folder_of_serves_logs_that_cannot_be_had_is_refused(tmp_path: Path, folder: str):
    def deployment(logs_dir: str) -> list[dict[str, Any]]:
        section = {"logging_config": {"logs_dir": logs_dir}}
        return [
            {**section, "applications": []},
            {"applications": [section]},
            {"applications": [{"deployments": [{"name": "Pair", **section}]}]},
        ]

    for each in deployment(str(tmp_path / "logs")):
        check_logs_folders(each)
    for each in deployment(folder):
        with pytest.raises(ConfigError, match=f"logs_dir '{folder}' cannot be used"):
            check_logs_folders(each)

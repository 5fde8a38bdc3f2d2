"""Obstacles to a deployment, found before anything is started."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import psutil

from cluster.cache_budget import draft_cache_config, prefill_cache_config
from cluster.config import DeployConfig
from cluster.deploy_file import DeployFile
from cluster.model_path import resolve_model_path
from cluster.ports import is_free
from engine.model.checkpoint.scheme import scheme_of
from engine.model.checkpoint.stored_weights import stored_weights
from engine.model.checkpoint.weight_files import read_config, tensor_headers
from protos.errors import ConfigError

_GIB = 1 << 30
_LAST_PORT = 65_535
_RAY_BYTES = int(1.5 * _GIB)  # idle cluster, controller, proxy and ingress
_PROCESS_BYTES = int(0.45 * _GIB)  # Python with torch, of shell, target and draft each


def check_ports(file: DeployFile) -> None:
    """Raise ConfigError for a port that cannot be had, naming it, its key and the process that has it."""
    if file.http_port == file.grpc_port:
        raise ConfigError(f"http_options.port and grpc_options.port are both {file.http_port}; change one of them")
    for host, port, key in (
        (file.http_host, file.http_port, "http_options"),
        ("0.0.0.0", file.grpc_port, "grpc_options"),
    ):
        if port is not None and not 1 <= port <= _LAST_PORT:
            raise ConfigError(f"{key}.port is {port}; it must be 1 to {_LAST_PORT}")
        if port is not None and not is_free(host, port):
            raise ConfigError(
                f"port {port} is taken by {_holder(port)}; stop it, or change {key}.port in deploy.yaml, "
                "or --port and --grpc-port (an Outrider that runs already stops with Ctrl-C, or with `serve shutdown`)"
            )


def check_memory(config: DeployConfig) -> None:
    """Raise ConfigError if the models, their caches and Ray need more memory than is available."""
    pairs, prefills = config.pair.max_replicas, config.prefill.max_replicas
    needed = _RAY_BYTES + pairs * _pair_bytes(config) + prefills * _prefill_bytes(config)
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"about {needed / _GIB:.1f} GiB of memory are needed and {available / _GIB:.1f} GiB are available; "
            "lower cache.memory_gib or pair.num_replicas, or stop other programs"
        )


def _pair_bytes(config: DeployConfig) -> int:
    # Every rank of a target reads all of its weights before it keeps its part.
    targets = [config.target.path] * config.target.tensor_parallel_size
    paths = [path for path in (*targets, config.draft.path) if path is not None]
    weights = sum(_weight_bytes(Path(resolve_model_path(path))) for path in paths)
    caches = config.cache.to_engine().memory_bytes or 0
    if config.draft.path is not None:
        caches += draft_cache_config(config.cache).memory_bytes or 0
    return weights + caches + (1 + len(paths)) * _PROCESS_BYTES


def _prefill_bytes(config: DeployConfig) -> int:
    rank = _weight_bytes(Path(resolve_model_path(config.target.path))) + _PROCESS_BYTES
    return config.target.tensor_parallel_size * rank + (prefill_cache_config(config).memory_bytes or 0)


def _weight_bytes(folder: Path) -> int:
    """Return twice the weights' size, which loading takes: packed weights beside those read, or float32 of bfloat16.

    Quantized weights are loaded in 2 bytes a number.
    """
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    scheme = scheme_of(read_config(folder), str(folder)) if folder.is_dir() else None
    if scheme is not None:
        quantized = stored_weights(scheme, tensor_headers(folder), str(folder))
        num_bytes += sum(2 * math.prod(stored.shape) for stored in quantized)
    return 2 * num_bytes


def _holder(port: int) -> str:
    """Name the process that listens on a port, as far as this user may know."""
    try:
        connections: list[Any] = psutil.net_connections("inet")
    except psutil.AccessDenied:
        return "another process"
    listening = (each for each in connections if each.status == psutil.CONN_LISTEN and each.laddr)
    for pid in {each.pid for each in listening if each.laddr.port == port and each.pid}:
        try:
            return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:80]})"
        except psutil.Error:
            continue
    return "another process"

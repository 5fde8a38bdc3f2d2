"""What rank 0 of a sharded model tells the others over a pipe, and how a rank joins them.

Messages are pickled: both ends are processes of one user and one program, the second started by the first.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.config import CacheConfig, ModelConfig
from engine.model.loader import resolve_device
from protos.errors import ConfigError

_LOOPBACK = "lo"  # all ranks are on one machine, and nobody else has to reach them


@dataclass(frozen=True, slots=True)
class RankMessage:
    """The first message: who the rank is, and what it is to load. `folder` is where the ranks meet."""

    index: int
    model: ModelConfig
    cache: CacheConfig
    max_model_len: int | None
    folder: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A rank runs, or has read its weights and waits for the others, or could not: `failure` says why."""

    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Rank 0 is calling this method of its runner; every rank calls it now."""

    method: str
    arguments: tuple[Any, ...]


def rank_device(model: ModelConfig, index: int) -> torch.device:
    """The device of a rank: the GPU of its number among those this process sees, or the processor.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    device = resolve_device(model.device)
    if device.type != "cuda":
        return device
    num_gpus = torch.cuda.device_count()
    if num_gpus < model.tensor_parallel_size:
        raise ConfigError(
            f"target.tensor_parallel_size is {model.tensor_parallel_size}, and this process sees {num_gpus} GPUs; "
            "lower it, or give the pair more GPUs"
        )
    return torch.device("cuda", index)


def join_ranks(message: RankMessage, device: torch.device) -> None:
    """Make this process one of the ranks: NCCL between GPUs, gloo in main memory; returns when all have come."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    num_ranks = message.model.tensor_parallel_size
    store = dist.FileStore(str(Path(message.folder) / "store"), num_ranks)
    timeout = timedelta(seconds=message.timeout_s)
    dist.init_process_group(backend, store=store, rank=message.index, world_size=num_ranks, timeout=timeout)


def send(connection: Connection, message: object) -> None:
    """Send one message; raises OSError where nobody reads."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """The next message; raises EOFError or OSError where there can be none."""
    return pickle.loads(connection.recv_bytes())

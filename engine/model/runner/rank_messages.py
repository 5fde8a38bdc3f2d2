"""Messages from rank 0 of a sharded model to the other ranks, over a pipe, and how a rank joins the group.

The first message is a `RankMessage`. Until its barrier a rank answers None while it goes well, or the reason why it
failed to load. Then each message is a call: a method of the runner and its arguments, which every rank calls now.
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

from engine.config import CacheConfig, HeadConfig, ModelConfig
from engine.model.loader import resolve_device
from protos.errors import ConfigError

_LOOPBACK = "lo"  # all ranks are on one machine, and no other machine has to reach them


@dataclass(frozen=True, slots=True)
class RankMessage:
    """First message: the rank's index and what to load. Ranks find each other by a file in `folder`."""

    index: int
    model: ModelConfig
    cache: CacheConfig
    max_model_len: int | None
    head: HeadConfig | None
    folder: str
    timeout_s: float


def rank_device(model: ModelConfig, index: int) -> torch.device:
    """Return the rank's device: the visible GPU of its number, or the processor.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    device = resolve_device(model.device)
    if device.type != "cuda":
        return device
    num_gpus = torch.cuda.device_count()
    if num_gpus < model.tensor_parallel_size:
        raise ConfigError(
            f"target.tensor_parallel_size is {model.tensor_parallel_size}, but this process sees {num_gpus} GPUs; "
            "lower it, or give the pair more GPUs"
        )
    return torch.device("cuda", index)


def join_ranks(message: RankMessage, device: torch.device) -> None:
    """Make this process one of the ranks: NCCL between GPUs, gloo in main memory. Returns when all have joined."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    num_ranks = message.model.tensor_parallel_size
    path = str(Path(message.folder) / "store")
    store = dist.FileStore(path, num_ranks)  # type: ignore[attr-defined]  # torch exports it by another name
    timeout = timedelta(seconds=message.timeout_s)
    dist.init_process_group(backend, store=store, rank=message.index, world_size=num_ranks, timeout=timeout)


def send(connection: Connection, message: object) -> None:
    """Send one message; raises OSError if the other end is closed."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Return the next message; raise EOFError or OSError if the other end is closed."""
    return pickle.loads(connection.recv_bytes())

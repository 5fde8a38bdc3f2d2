"""Runner of a model sharded over several processes: this is rank 0, and the others follow its calls.

The first message to a rank, over a pipe, is a `RankMessage`. Until its barrier a rank answers None while it goes well,
or the reason why it failed to load. Then each message is a call: a method of the runner and its arguments, which every
rank calls now. Messages are pickled: both ends are processes of one user and one program, the second started by the
first.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch.span import Span
from engine.config import CacheConfig, HeadConfig, ModelConfig
from engine.kv_cache.block_pool import KVMove
from engine.model.loader import load_config, resolve_device
from engine.model.runner.model_runner import ModelRunner
from engine.model.tensor_parallel import Rank, check_divisible
from protos.errors import ConfigError, EngineError

_LOOPBACK = "lo"  # all ranks are on one machine, and no other machine has to reach them


def load_runner(
    model: ModelConfig, cache: CacheConfig, max_model_len: int | None = None, head: HeadConfig | None = None
) -> ModelRunner:
    """Return the runner of a model, sharded if configured. Raises ConfigError if the model cannot be served."""
    if model.tensor_parallel_size == 1:
        return ModelRunner(model, cache, max_model_len, head)
    return TensorParallelRunner(model, cache, max_model_len, head)


class TensorParallelRunner(ModelRunner):
    """A `ModelRunner` whose passes, moves and exchanged blocks span all ranks.

    Every call is sent to the other ranks first and then made here, so all meet in the collectives of their layers.
    Only rank 0 schedules, samples and verifies, and keeps the unsharded head. The other ranks reserve room for the
    head's keys and values, since a block has the same bytes on all. Blocks are exported with all heads, so engines with
    another number of ranks, or one, can read them.
    """

    def __init__(
        self, model: ModelConfig, cache: CacheConfig, max_model_len: int | None = None, head: HeadConfig | None = None
    ) -> None:
        """Start the ranks, load, check; raises ConfigError for what cannot be sharded or served."""
        check_divisible(load_config(model.path), model.tensor_parallel_size)
        self._ranks = RankGroup(model, cache, max_model_len, head)
        try:
            super().__init__(model, cache, max_model_len, head, self._ranks.rank)
        except BaseException:
            self._ranks.close()
            raise

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason, in another thread, when a rank dies: nothing can be computed then."""
        self._ranks.watch(on_lost)

    def close(self) -> None:
        """End the other ranks; a second call does nothing."""
        self._ranks.close()

    def forward(self, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        assert input_ids is None, "other ranks do not have this device's tokens"
        self._ranks.tell("forward", [span.trimmed(self.block_size) for span in spans])  # less to send
        return super().forward(spans)

    def move(self, moves: Seq[KVMove]) -> None:
        if moves:
            self._ranks.tell("move", list(moves))
        super().move(moves)

    def export_blocks(self, block_ids: Seq[int]) -> Tensor:
        self._ranks.tell("export_blocks", list(block_ids))
        return super().export_blocks(block_ids)

    def import_blocks(self, block_ids: Seq[int], blocks: Tensor) -> None:
        self._ranks.tell("import_blocks", list(block_ids))
        super().import_blocks(block_ids, blocks)

    def copy_blocks(self, source_ids: Seq[int], block_ids: Seq[int]) -> None:
        self._ranks.tell("copy_blocks", list(source_ids), list(block_ids))
        super().copy_blocks(source_ids, block_ids)


logger = logging.getLogger(__name__)


class RankGroup:
    """Processes of ranks 1, 2, ...; this process is rank 0, in the constructing thread.

    When a rank dies, a call that waits for it raises at once if gloo connects the ranks. Between GPUs it may wait until
    the timeout of a collective; end the process instead (`watch`). The ranks die with the thread that started
    them.

    Attributes:
        rank: this process.
    """

    def __init__(
        self, model: ModelConfig, cache: CacheConfig, max_model_len: int | None = None, head: HeadConfig | None = None
    ) -> None:
        """Start the others, which load at once.

        Raises:
            ConfigError: this machine has too few GPUs.
            EngineError: this process leads a group already.
        """
        device = rank_device(model, 0)
        if dist.is_initialized():
            raise EngineError("this process already has a sharded model, and the limit is 1; close it first")
        self._on_lost: Callable[[str], None] = lambda reason: None
        self.rank = Rank(0, model.tensor_parallel_size, device, self._barrier)
        self._folder = tempfile.mkdtemp(prefix=f"outrider-{os.getpid()}-ranks-")
        self._is_closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        # Below the watchdog's limit for a step, so that the log names the cause.
        messages = [
            RankMessage(index, model, cache, max_model_len, head, self._folder, 100.0)
            for index in range(model.tensor_parallel_size)
        ]
        try:
            # Start the others and wait until each has begun, then meet them in the process group.
            for message in messages[1:]:
                self._start(message)
            self._await_progress()  # else a rank that cannot start would block until the timeout
            join_ranks(messages[0], device)
        except BaseException:
            self.close()
            raise

    def tell(self, method: str, *arguments: Any) -> None:
        """Have every other rank call this method of its runner now. Raises EngineError if one is gone or stuck."""
        for index, connection in enumerate(self._connections, start=1):
            try:
                send(connection, (method, arguments))
            except OSError as error:
                raise EngineError(f"rank {index} of the target takes no calls: {error}") from error

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason when a rank has died, in another thread or in this call."""
        self._on_lost = on_lost
        for index, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                on_lost(f"rank {index} of the target exited with code {process.returncode}")

    def close(self) -> None:
        """End the other ranks; a second call does nothing."""
        self._is_closing = True
        for process in self._processes:
            process.kill()
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, message: RankMessage) -> None:
        ours, theirs = socket.socketpair()
        # A stopped rank must not stop this one for good: a full pipe raises after a while.
        limit = struct.pack("ll", int(message.timeout_s), int(message.timeout_s % 1 * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.model.runner.rank_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        connection = Connection(ours.detach())
        self._processes.append(process)
        self._connections.append(connection)
        send(connection, message)
        threading.Thread(target=self._watch, args=(message.index, process), name="rank-watch", daemon=True).start()

    def _barrier(self) -> None:
        """Wait until every rank has its weights, then let all continue. Raises ConfigError with a rank's failure."""
        self._await_progress()
        for connection in self._connections:
            send(connection, None)

    def _await_progress(self) -> None:
        for index, connection in enumerate(self._connections, start=1):
            try:
                if not connection.poll(1800):
                    raise EngineError(f"rank {index} of the target did not load within half an hour; see its log")
                failure: str | None = receive(connection)
            except (EOFError, OSError) as error:
                raise EngineError(f"rank {index} of the target died while loading; see its log") from error
            if failure is not None:
                raise ConfigError(f"rank {index} of the target: {failure}")

    def _watch(self, index: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._is_closing:
            reason = f"rank {index} of the target exited with code {code}"
            logger.error("%s; the engine cannot continue without it", reason)
            self._on_lost(reason)


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

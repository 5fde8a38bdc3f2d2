"""The thread that writes the log. It joins the positions of each request into complete files of a fixed size."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.position_log.shard import LogFolder, LoggedModel, LoggedRequest, write_shard

logger = logging.getLogger(__name__)


class TopRows:
    """Copies logits rows for the top-k log.

    The engine's thread creates it and only copies. A GPU computes the top k in parallel with the next pass. On a CPU
    `read` computes it in one numpy thread, since torch's threads belong to the engine.

    Args:
        logits: `[R, V]` float32, overwritten by the next pass.
        rows: indices of the rows to copy.
        top_k: at most V.
    """

    def __init__(self, logits: Tensor, rows: list[int], top_k: int) -> None:
        self._top_k = top_k
        index = torch.tensor(rows, device=logits.device)
        copied = logits.index_select(0, index)  # [N, V]
        self.num_bytes = copied.numel() * copied.element_size()
        self._rows: Tensor | None = copied
        self._top: tuple[Tensor, Tensor] | None = None
        if copied.is_cuda:
            self._rows = None
            self._send(copied)

    def read(self) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return the ids and log-probabilities `[N, top_k]` of each row, likeliest first."""
        if self._rows is not None:
            return top_logprobs(self._rows.numpy(), self._top_k)
        assert self._top is not None
        self._event.synchronize()
        ids, logprobs = self._top
        return ids.numpy(), logprobs.numpy()

    def _send(self, rows: Tensor) -> None:
        top = rows.log_softmax(dim=1).topk(self._top_k)
        self._top = (_pinned(top.indices.to(torch.int32)), _pinned(top.values.to(torch.float16)))
        self._event = torch.cuda.Event()
        self._event.record()


def top_logprobs(rows: NDArray[np.float32], top_k: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return the ids and log-probabilities `[N, top_k]` of the likeliest tokens of logits `rows` [N, V]."""
    peaks = rows.max(axis=1, keepdims=True)
    totals = peaks + np.log(np.exp(rows - peaks).sum(axis=1, keepdims=True))
    ids = np.argpartition(rows, rows.shape[1] - top_k, axis=1)[:, rows.shape[1] - top_k :]  # [N, top_k]
    values = np.take_along_axis(rows, ids, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    ids, values = np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)
    return ids.astype(np.int32), (values - totals).astype(np.float16)


def _pinned(values: Tensor) -> Tensor:
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """The positions of one pass: `rows[kept[i]]` predicts the token at `positions[i]` of request `request_ids[i]`."""

    rows: TopRows
    kept: Seq[int]
    request_ids: Seq[str]
    positions: Seq[int]


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that finished or was aborted."""

    request_id: str
    traffic_class: str
    temperature: float
    repetition_penalty: float
    token_ids: Seq[int]


class LogWriter:
    """Writes on its own thread; `put` never waits.

    Any thread may read the counters. `num_positions` counts positions that are in a file.

    Args:
        folder: the folder of the files, with its size limit.
        model: the target.
    """

    def __init__(self, folder: LogFolder, model: LoggedModel) -> None:
        self.num_positions = 0
        self.num_bytes = 0
        self.num_taken_bytes = 0  # bytes of rows taken from the queue
        self.is_stopped = False
        self._folder = folder
        self._model = model
        self._shard_bytes = 8 << 20  # of a full file
        self._queue: queue.SimpleQueue[VerifiedRows | EndedRequest | None] = queue.SimpleQueue()
        self._open: dict[str, list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float16]]]] = {}
        self._shard: list[LoggedRequest] = []
        self._file: Path | None = None
        self._file_bytes = 0
        self._num_unwritten = 0
        self._thread = threading.Thread(target=self._run, name="position-log", daemon=True)
        self._thread.start()

    def put(self, message: VerifiedRows | EndedRequest) -> None:
        """Queue a message for writing."""
        self._queue.put(message)

    def close(self) -> None:
        """Write the remaining positions. A second call does nothing."""
        self._queue.put(None)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(10, os.getpriority(os.PRIO_PROCESS, thread)))
        try:
            self._write_until_closed()
        except OSError as error:
            self._stop(f"{error}; free room, and restart the deployment")
        except Exception:
            logger.exception("the log's thread failed")
            self._stop("see the error above")

    def _write_until_closed(self) -> None:
        written_s, is_open = time.monotonic(), True
        period_s = 5.0  # between writes of the newest file, which grows until it is full
        while is_open:
            is_open = self._take(period_s)
            if not is_open or time.monotonic() - written_s >= period_s or self._size > self._shard_bytes:
                self._write()
                written_s = time.monotonic()

    def _take(self, timeout_s: float) -> bool:
        """Process one message. Returns False after the last one."""
        try:
            message = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return True
        match message:
            case VerifiedRows():
                self._keep(message)
            case EndedRequest():
                self._end(message)
        return message is not None

    def _keep(self, verified: VerifiedRows) -> None:
        top_ids, top_logprobs = verified.rows.read()
        self.num_taken_bytes += verified.rows.num_bytes
        places = np.array(verified.positions, np.int32)
        for request_id in dict.fromkeys(verified.request_ids):
            chosen = [index for index, each in enumerate(verified.request_ids) if each == request_id]
            rows = [verified.kept[index] for index in chosen]
            found = (places[chosen], top_ids[rows], top_logprobs[rows])
            self._open.setdefault(request_id, []).append(found)

    def _end(self, ended: EndedRequest) -> None:
        found = self._open.pop(ended.request_id, [])
        if not found:
            return
        positions, ids, logprobs = map(np.concatenate, zip(*found, strict=True))
        is_committed = positions < len(ended.token_ids)  # verified tokens after a stop token are not committed
        self._shard.append(
            LoggedRequest(
                traffic_class=ended.traffic_class,
                temperature=ended.temperature,
                repetition_penalty=ended.repetition_penalty,
                token_ids=np.array(ended.token_ids, np.int32),
                positions=positions[is_committed],
                top_ids=ids[is_committed],
                top_logprobs=logprobs[is_committed],
            )
        )
        self._num_unwritten += int(is_committed.sum())

    @property
    def _size(self) -> int:
        return sum(request.num_bytes for request in self._shard)

    def _write(self) -> None:
        """Rewrite the newest file if it has grown, and start the next one if it is full."""
        if not self._num_unwritten:
            return
        if self._file is None:
            self._file = self._folder.new_file()
        size = write_shard(self._file, self._model, self._shard)
        self._folder.make_room(self._file)
        self.num_bytes += size - self._file_bytes
        self.num_positions += self._num_unwritten
        self._file_bytes, self._num_unwritten = size, 0
        if size > self._shard_bytes:
            self._file, self._file_bytes, self._shard = None, 0, []

    def _stop(self, reason: str) -> None:
        """Stop logging. Requests continue without a log."""
        self.is_stopped = True
        self._open.clear()
        self._shard.clear()
        logger.error("the log of verified positions has stopped: %s", reason)

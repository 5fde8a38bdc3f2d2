"""The log of verified positions: the engine copies rows of logits, and a thread writes them. No step waits."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.accounting.counters import class_name
from engine.accounting.engine_stats import PositionLogStats
from engine.accounting.record import PassRecord
from engine.batch.side_stream import PendingTensor
from engine.config import MAX_LOG_BYTES
from engine.position_log.shard import Ints, LoggedModel, LoggedRequest, make_room, new_file, write_shard
from engine.sequence.sequence import Sequence
from engine.verifier.verify_task import VerifyTask

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
        if copied.is_cuda:
            self._rows = None
            top = copied.log_softmax(dim=1).topk(top_k)
            self._ids = PendingTensor(top.indices.to(torch.int32))
            self._logprobs = PendingTensor(top.values.to(torch.float16))

    def read(self) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return the ids and log-probabilities `[N, top_k]` of each row, likeliest first."""
        if self._rows is not None:
            return top_logprobs(self._rows.numpy(), self._top_k)
        return self._ids.in_main_memory().numpy(), self._logprobs.in_main_memory().numpy()


def top_logprobs(rows: NDArray[np.float32], top_k: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return the ids and log-probabilities `[N, top_k]` of the likeliest tokens of logits `rows` [N, V]."""
    peaks = rows.max(axis=1, keepdims=True)
    totals = peaks + np.log(np.exp(rows - peaks).sum(axis=1, keepdims=True))
    ids = np.argpartition(rows, rows.shape[1] - top_k, axis=1)[:, rows.shape[1] - top_k :]  # [N, top_k]
    values = np.take_along_axis(rows, ids, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    ids, values = np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)
    return ids.astype(np.int32), (values - totals).astype(np.float16)


class LogWriter:
    """Joins the positions of each request into complete files of a fixed size, on its own thread; no call waits.

    Any thread may read the counters. `num_positions` counts positions that are in a file.

    Args:
        folder: the folder of the files, which may take `MAX_LOG_BYTES`.
        model: the target.
    """

    def __init__(self, folder: Path, model: LoggedModel) -> None:
        self.num_positions = 0
        self.num_bytes = 0
        self.num_taken_bytes = 0  # bytes of rows taken from the queue
        self.is_stopped = False
        self._folder = folder
        self._model = model
        self._shard_bytes = 8 << 20  # of a full file
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[str, list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float16]]]] = {}
        self._shard: list[LoggedRequest] = []
        self._file: Path | None = None
        self._file_bytes = 0
        self._num_unwritten = 0
        self._thread = threading.Thread(target=self._run, name="position-log", daemon=True)
        self._thread.start()

    def keep(self, rows: TopRows, kept: Seq[int], request_ids: Seq[str], positions: Seq[int]) -> None:
        """Queue positions of one pass: `rows[kept[i]]` predicts the token at `positions[i]` of `request_ids[i]`."""
        self._queue.put(partial(self._keep, rows, kept, request_ids, positions))

    def end(self, sequence: Sequence) -> None:
        """Queue the tokens of a request that finished or was aborted."""
        sampling, token_ids = sequence.sampling, np.array(sequence.token_ids, np.int32)
        facts = class_name(sequence), sampling.temperature, sampling.repetition_penalty, token_ids
        self._queue.put(partial(self._end, sequence.request_id, *facts))

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
        """Make the oldest queued call. Returns False after the last call."""
        try:
            act = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return True
        if act is not None:
            act()
        return act is not None

    def _keep(self, rows: TopRows, kept: Seq[int], request_ids: Seq[str], positions: Seq[int]) -> None:
        top_ids, top_logprobs = rows.read()
        self.num_taken_bytes += rows.num_bytes
        places = np.array(positions, np.int32)
        for request_id in dict.fromkeys(request_ids):
            chosen = [index for index, each in enumerate(request_ids) if each == request_id]
            own = [kept[index] for index in chosen]
            self._open.setdefault(request_id, []).append((places[chosen], top_ids[own], top_logprobs[own]))

    def _end(
        self, request_id: str, traffic_class: str, temperature: float, repetition_penalty: float, token_ids: Ints
    ) -> None:
        found = self._open.pop(request_id, [])
        if not found:
            return
        positions, *tops = map(np.concatenate, zip(*found, strict=True))
        is_committed = positions < len(token_ids)  # verified tokens after a stop token are not committed
        logged = (each[is_committed] for each in (positions, *tops))
        self._shard.append(LoggedRequest(traffic_class, temperature, repetition_penalty, token_ids, *logged))
        self._num_unwritten += int(is_committed.sum())

    @property
    def _size(self) -> int:
        return sum(request.num_bytes for request in self._shard)

    def _write(self) -> None:
        """Rewrite the newest file if it has grown, and start the next one if it is full."""
        if not self._num_unwritten:
            return
        if self._file is None:
            self._file = new_file(self._folder)
        size = write_shard(self._file, self._model, self._shard)
        make_room(self._file, MAX_LOG_BYTES)
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


class PositionLog:
    """Logs the target's likeliest tokens at verified positions, for requests that are to be logged.

    Only `stats` may be used outside the engine's thread. A log that stops or is late loses positions and has no
    other effect.
    """

    def __init__(self, folder: str, model: LoggedModel) -> None:
        self._model = model
        self._writer = LogWriter(Path(folder), model)
        self._sequences: dict[str, Sequence] = {}
        # Rows of the pass that is verified next; of each logged sequence its index there, its first row and its tokens.
        self._copied: tuple[TopRows, list[tuple[int, int, int]]] | None = None
        self._num_put_bytes = 0
        self._num_dropped = 0

    @property
    def stats(self) -> PositionLogStats:
        writer = self._writer
        return PositionLogStats(writer.num_positions, self._num_dropped, writer.num_bytes, writer.is_stopped)

    def copy(self, logits: Tensor, tasks: Seq[VerifyTask], num_drafts: Seq[int]) -> None:
        """Copy the rows of logged tasks, unless the writer is late.

        Call it before verification: a next pass that is issued meanwhile overwrites `logits` [R, V].
        """
        rows: list[int] = []
        chosen = []
        for index, (task, num) in enumerate(zip(tasks, num_drafts, strict=True)):
            if self._is_logged(task.sequence):
                chosen.append((index, len(rows), len(task.sequence.token_ids)))
                rows += range(task.first_row, task.first_row + num + 1)
        if not chosen:
            return
        num_bytes = len(rows) * logits.shape[1] * logits.element_size()
        # The writer lags; further rows are dropped.
        if self._num_put_bytes - self._writer.num_taken_bytes + num_bytes > 32 << 20:
            self._num_dropped += len(chosen)  # at least the sampled position of each
            return
        self._copied = TopRows(logits, rows, self._model.top_k), chosen

    def on_pass(self, record: PassRecord) -> None:
        """Pass the copied rows of verified tokens to the writer."""
        copied, self._copied = self._copied, None
        if copied is None:
            return
        rows, chosen = copied
        kept: list[int] = []
        request_ids: list[str] = []
        positions: list[int] = []
        for index, first_row, start in chosen:
            sequence, outcome = record.passes[index].sequence, record.passes[index].outcome
            if not (outcome.is_exact and outcome.is_finite):
                continue
            self._sequences[sequence.request_id] = sequence
            num_tokens = len(outcome.token_ids)
            kept += [first_row + outcome.row_of(number) for number in range(num_tokens)]
            request_ids += [sequence.request_id] * num_tokens
            positions += range(start, start + num_tokens)
        self._num_put_bytes += rows.num_bytes
        self._writer.keep(rows, kept, request_ids, positions)

    def end(self, request_id: str) -> None:
        """Pass the tokens of an ended request to the writer. Requests that are not logged are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._writer.end(sequence)

    def close(self) -> None:
        """Write the remaining positions. A second call does nothing."""
        self._writer.close()

    def _is_logged(self, sequence: Sequence) -> bool:
        has_room = not self._writer.is_stopped and sequence.num_output_tokens < 4096
        return sequence.request.is_logged and has_room

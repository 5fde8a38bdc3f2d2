"""The queued work of each worker: its last signal, plus work sent since, minus work done.

A load signal is outdated on arrival. Between signals, a worker's backlog is extrapolated with its measured rate:

    backlog(now) = max(0, backlog(then) - rate * (now - then)), and each request sent adds its uncached tokens

so a burst between two signals accounts for its own weight. A signal replaces the extrapolated value, and work sent
after its measurement is added again. Pure arithmetic on given clocks, without prefixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from protos.block_keys import WorkerLoad

FloatArray = NDArray[np.float64]

_SILENT_FROM_S = 5.0  # age of work that a worker has not reported on

_ROW = np.dtype(
    [
        ("backlog_tokens", np.float64),
        ("as_of_s", np.float64),  # the moment of backlog_tokens
        ("num_requests", np.float64),
        ("reported_requests", np.float64),  # among them, reported by the last signal
        ("sent_s", np.float64),  # time of the last request sent
        ("decode_tokens", np.float64),
        ("prefill_tokens_per_s", np.float64),  # 0 until measured
        ("decode_slowdown", np.float64),
        ("decode_tokens_per_s", np.float64),  # 0 until measured
        ("hash", np.uint64),  # of the worker's name: the same in every process
    ]
)


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The candidates' loads at one moment; every array is [W], in the order of `worker_ids`.

    Attributes:
        rows: index of each worker in the arrays.
        backlog_tokens: uncached prompt tokens queued before a new request.
        prefill_tokens_per_s: never 0.
    """

    worker_ids: tuple[str, ...]
    rows: Mapping[str, int]
    backlog_tokens: FloatArray
    num_requests: FloatArray
    decode_tokens: FloatArray
    prefill_tokens_per_s: FloatArray
    decode_slowdown: FloatArray
    decode_tokens_per_s: FloatArray
    hashes: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.worker_ids)


@dataclass(frozen=True, slots=True)
class SentWork:
    """The router's estimate of the work of a request that it just sent to a worker."""

    request_id: str
    uncached_tokens: int
    sent_at_s: float


class LoadTable:
    """The latest signal of every worker, plus the work that this router has sent since.

    Args:
        transit_s: the longest transit time of a request. A request sent less than this before a signal was measured is
            still added to it; counting it twice for a moment is better than not at all.
        default_prefill_tokens_per_s: the rate while no worker has measured its own.
    """

    def __init__(self, transit_s: float = 0.01, default_prefill_tokens_per_s: float = 1000.0) -> None:
        self._transit_s = transit_s
        self._default_rate = default_prefill_tokens_per_s
        self._table = np.zeros(8, dtype=_ROW)
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []
        self._signals: dict[str, WorkerLoad] = {}
        self._sent: dict[str, list[SentWork]] = {}  # not yet covered by a signal
        self._last_ids: tuple[str, ...] | None = None  # the last candidates, which seldom change, and their rows
        self._last_rows = np.zeros(0, dtype=np.intp)  # [W], of the table

    def update(self, load: WorkerLoad) -> None:
        """Apply a signal; an outdated one, or one of an older epoch, changes nothing."""
        last = self._signals.get(load.worker_id)
        if last and (load.epoch, load.measured_at_s) < (last.epoch, last.measured_at_s):
            return
        self._signals[load.worker_id] = load
        sent = self._sent.setdefault(load.worker_id, [])
        if last and load.epoch > last.epoch:
            sent.clear()  # the restarted worker has lost it
        sent[:] = [work for work in sent if work.sent_at_s > load.measured_at_s - self._transit_s]
        self._rebuild(load, sent)

    def sent(self, worker_id: str, work: SentWork) -> None:
        """Add a request's work to a worker until a signal measured after `work.sent_at_s` replaces the estimate."""
        self._sent.setdefault(worker_id, []).append(work)
        self._add(self._row(worker_id), work)

    def is_silent(self, worker_id: str, now_s: float) -> bool:
        """True if a worker was sent work and has reported nothing for longer than a busy worker stays silent.

        It hangs, or its reports are lost; after a minute it is tried again.
        """
        return any(_SILENT_FROM_S < now_s - work.sent_at_s < 60.0 for work in self._sent.get(worker_id, ()))

    def withdraw(self, worker_id: str, request_id: str) -> None:
        """Remove a request that the worker refused or never received; unknown ids are ignored."""
        sent = self._sent.get(worker_id, [])
        kept = [work for work in sent if work.request_id != request_id]
        signal = self._signals.get(worker_id)
        if len(kept) == len(sent):
            return
        sent[:] = kept
        self._rebuild(signal or WorkerLoad(worker_id, 0, 0.0, 0, 0, 0, 0), kept)

    def forget(self, worker_id: str) -> None:
        """Drop a worker that has left; unknown workers are ignored."""
        row = self._rows.pop(worker_id, None)
        if row is not None:
            self._free_rows.append(row)
        self._signals.pop(worker_id, None)
        self._sent.pop(worker_id, None)
        self._last_ids = None

    def view(self, worker_ids: Sequence[str], now_s: float) -> FleetLoad:
        """Return the loads of these workers at `now_s`.

        A worker without a signal counts as idle, at the mean rate of the others.
        """
        worker_ids = tuple(worker_ids)
        if self._last_ids != worker_ids:
            self._last_ids = worker_ids
            self._last_rows = np.array([self._row(worker_id) for worker_id in worker_ids], dtype=np.intp)
        rows = self._table[self._last_rows]  # [W], a copy
        rates = self._rates(rows)
        drained = self._speed(rates, rows) * np.maximum(now_s - rows["as_of_s"], 0.0)
        return FleetLoad(
            worker_ids=worker_ids,
            rows={worker_id: row for row, worker_id in enumerate(worker_ids)},
            backlog_tokens=np.maximum(rows["backlog_tokens"] - drained, 0.0),
            # Requests that no signal has reported may have ended: after ten seconds they no longer count.
            num_requests=np.where(now_s - rows["sent_s"] > 10.0, rows["reported_requests"], rows["num_requests"]),
            decode_tokens=rows["decode_tokens"],
            prefill_tokens_per_s=rates,
            decode_slowdown=rows["decode_slowdown"],
            decode_tokens_per_s=rows["decode_tokens_per_s"],
            hashes=rows["hash"],
        )

    def _rebuild(self, load: WorkerLoad, sent: Sequence[SentWork]) -> None:
        row = self._row(load.worker_id)
        self._table[row] = (
            load.queued_prefill_tokens,
            load.measured_at_s,
            load.num_waiting_requests + load.num_running_requests,
            load.num_waiting_requests + load.num_running_requests,
            0.0,
            load.running_decode_tokens,
            load.prefill_tokens_per_s,
            load.decode_slowdown,
            load.decode_tokens_per_s,
            self._table[row]["hash"],
        )
        for work in sent:
            self._add(row, work)

    def _add(self, row: int, work: SentWork) -> None:
        """Extrapolate the row's backlog to the time of sending, and add the request."""
        entry = self._table[row]
        rate = entry["prefill_tokens_per_s"] or self._default_rate
        elapsed_s = max(work.sent_at_s - entry["as_of_s"], 0.0)
        drained = elapsed_s * rate / (1.0 + entry["decode_slowdown"] * entry["decode_tokens"])
        entry["backlog_tokens"] = max(entry["backlog_tokens"] - drained, 0.0) + work.uncached_tokens
        entry["as_of_s"] = max(entry["as_of_s"], work.sent_at_s)
        entry["num_requests"] += 1
        entry["sent_s"] = max(entry["sent_s"], work.sent_at_s)

    def _rates(self, rows: NDArray[np.void]) -> FloatArray:
        rates: FloatArray = rows["prefill_tokens_per_s"]
        is_measured = rates > 0
        if is_measured.all():
            return rates
        fallback = rates[is_measured].mean() if is_measured.any() else self._default_rate
        return np.where(is_measured, rates, fallback)

    @staticmethod
    def _speed(rates: FloatArray, rows: NDArray[np.void]) -> FloatArray:
        """Return prefill tokens per second while the worker also decodes."""
        speed: FloatArray = rates / (1.0 + rows["decode_slowdown"] * rows["decode_tokens"])
        return speed

    def _row(self, worker_id: str) -> int:
        row = self._rows.get(worker_id)
        if row is None:
            row = self._rows[worker_id] = self._free_rows.pop() if self._free_rows else len(self._rows)
            if row == len(self._table):
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._table[row] = np.zeros((), dtype=_ROW)
            digest = blake2b(worker_id.encode(), digest_size=8).digest()
            self._table[row]["hash"] = int.from_bytes(digest, "little")
        return row

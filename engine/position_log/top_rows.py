"""Finds the likeliest tokens of rows of logits: on the log's thread on a CPU, on the device on a GPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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

"""Draws the tokens of several steps whose noise and limits are on the device before the first logits are.

For rows that `is_drawn_in_steps`, it draws the tokens of `engine.sampling.sampler.Sampler.draw`, by the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.batch.indexing import copy_array
from engine.native.library import highest
from engine.sampling.logits_row import LogitsRow, RowBatch, RunRequests
from engine.sampling.masks import has_bias, may_ban_tokens
from engine.sampling.noise import Purpose, gumbel, noise_keys
from engine.sampling.penalties import has_penalties
from engine.sampling.truncation import (
    cut_nuclei,
    cut_unlikely,
    has_min_p,
    has_top_k,
    has_top_p,
    log_least_share,
    nucleus_share,
)
from protos.messages import SamplingParams


def is_drawn_in_steps(sampling: SamplingParams) -> bool:
    """True if temperature, top-p, min-p and the noise of its position alone choose each token of a request."""
    return not (has_penalties(sampling) or has_bias(sampling) or may_ban_tokens(sampling) or has_top_k(sampling))


class StepDraw:
    """The draws of a fixed number of rows, in steps that a number on the device counts.

    Only the noise's position changes from step to step: the position after the last row's token.
    """

    def __init__(self, num_rows: int, num_steps: int, device: torch.device, *, has_kernels: bool) -> None:
        """`num_steps` is the most at a time; with `has_kernels`, Triton's kernels draw, and torch otherwise."""
        self._has_kernels = has_kernels
        self._requests: RunRequests | None = None  # of the last rows
        self._keys = torch.zeros(num_steps, num_rows, dtype=torch.int64, device=device)
        self._has_noise = torch.zeros(num_rows, dtype=torch.int8, device=device)
        # The factors of a draw: temperatures, and three neutral penalties.
        self._factors = torch.tensor([[1.0], [1.0], [0.0], [0.0]], device=device).repeat(1, num_rows)
        self._top_p, self._log_min_p = torch.ones(num_rows, device=device), torch.zeros(num_rows, device=device)
        self._log_min_p.fill_(float("-inf"))
        # No row has a line of counts, or an id with a bias.
        self._spans = torch.tensor([[-1], [0], [0], [0], [0]], dtype=torch.int32, device=device).repeat(1, num_rows)
        self._no_ids = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_biases, self._no_counts = torch.zeros(1, device=device), self._no_ids[None]

    def fill(self, rows: Seq[LogitsRow], num_steps: int) -> bool:
        """Prepare the draws of the next token of each row, and of the tokens after it.

        Return True if `draw` has to cut a row's distribution. Nothing waits for the device.
        """
        batch, num_rows = RowBatch.of(rows), len(self._has_noise)
        self._requests = requests = batch.recall(self._requests)
        positions = batch.positions + np.arange(num_steps)[:, None]
        keys = np.zeros((num_steps, num_rows), np.int64)
        keys[:, : len(batch)] = noise_keys(requests.key_prefixes, positions, Purpose.TARGET_GUMBEL).numpy()
        copy_array(self._keys[:num_steps], keys)
        columns = ((_has_noise, 0.0), (_temperature, 1.0), (nucleus_share, 1.0), (log_least_share, float("-inf")))
        buffers = (self._has_noise, self._factors[0], self._top_p, self._log_min_p)
        for (number, neutral), buffer in zip(columns, buffers, strict=True):
            values = np.full(num_rows, neutral)
            values[: len(batch)] = requests.column(number)
            copy_array(buffer, values)
        return bool(requests.matching(has_top_p) or requests.matching(has_min_p))

    def draw(self, logits: Tensor, step: Tensor, *, is_cut: bool) -> Tensor:
        """Draw the token of each row of logits [R, V] float32 in `step` [1] int64, on the device: [R] int64."""
        keys = self._keys.index_select(0, step)[0]
        if self._has_kernels:
            return self._draw_by_kernels(logits, keys, is_cut=is_cut)
        scores = logits / self._factors[0][:, None]
        if is_cut:
            scores = torch.where(self._top_p[:, None] < 1.0, cut_nuclei(scores, self._top_p[:, None]), scores)
            scores = cut_unlikely(scores, self._log_min_p[:, None])
        noise = gumbel(keys, scores.shape[1])
        return highest(scores + noise.mul_(self._has_noise[:, None]))

    def _draw_by_kernels(self, logits: Tensor, keys: Tensor, *, is_cut: bool) -> Tensor:
        # Imported here, since processes without a GPU may have no Triton.
        from engine.sampling.triton_draw import RowEdits, draw
        from engine.sampling.triton_nucleus import draw_nucleus

        noise = keys, self._has_noise
        edits = RowEdits(self._factors, self._spans, self._no_ids, self._no_biases, self._no_counts)
        if is_cut:
            return draw_nucleus(logits, noise, self._top_p, self._log_min_p, edits)
        return draw(logits, noise, edits)


def _has_noise(sampling: SamplingParams) -> float:
    return float(not sampling.is_greedy)


def _temperature(sampling: SamplingParams) -> float:
    return 1.0 if sampling.is_greedy else sampling.temperature

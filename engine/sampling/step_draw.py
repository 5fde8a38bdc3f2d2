"""Draws the tokens of several steps whose noise and limits are on the device before the first logits are.

For rows that `is_drawn_in_steps`, it draws the tokens of `engine.sampling.sampler.Sampler.draw`, by the same kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from engine.batch.indexing import copy_array
from engine.native.library import highest
from engine.sampling.logits_row import LogitsRow, RowBatch, RunRequests, temperature_of
from engine.sampling.masks import has_bias, may_ban_tokens
from engine.sampling.noise import Purpose, gumbel, noise_keys
from engine.sampling.penalties import has_penalties
from engine.sampling.truncation import (
    cut_nuclei,
    cut_top_k,
    cut_unlikely,
    has_min_p,
    has_top_k,
    has_top_p,
    log_least_share,
    nucleus_share,
)
from protos.messages import SamplingParams

MAX_TOP_K = 64  # Gemma's; others have up to 50


class DrawKind(Enum):
    """The limits of a batch's draws; each kind has those before it too."""

    ALL_TOKENS = "noise alone"
    NUCLEUS = "top_p and min_p"
    TOP_K = "top_k"


def is_drawn_in_steps(sampling: SamplingParams) -> bool:
    """True if temperature, top-k, top-p, min-p and the noise of its position choose each token of a request."""
    needs_host = has_penalties(sampling) or has_bias(sampling) or may_ban_tokens(sampling)
    return not (needs_host or _top_k(sampling) > MAX_TOP_K)


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
        self._top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # No row has a line of counts, or an id with a bias.
        self._spans = torch.tensor([[-1], [0], [0], [0], [0]], dtype=torch.int32, device=device).repeat(1, num_rows)
        self._no_ids = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_biases, self._no_counts = torch.zeros(1, device=device), self._no_ids[None]

    def fill(self, rows: Seq[LogitsRow], num_steps: int) -> DrawKind:
        """Prepare the draws of the next token of each row, and of the tokens after it; return the kind of all draws.

        Nothing waits for the device.
        """
        batch, num_rows = RowBatch.of(rows), len(self._has_noise)
        self._requests = requests = batch.recall(self._requests)
        positions = batch.positions + np.arange(num_steps)[:, None]
        keys = np.zeros((num_steps, num_rows), np.int64)
        keys[:, : len(batch)] = noise_keys(requests.key_prefixes, positions, Purpose.TARGET_GUMBEL).numpy()
        copy_array(self._keys[:num_steps], keys)
        columns: list[tuple[Tensor, Callable[[SamplingParams], float], float]] = [
            (self._has_noise, _has_noise, 0.0),
            (self._factors[0], temperature_of, 1.0),
            (self._top_p, nucleus_share, 1.0),
            (self._log_min_p, log_least_share, -math.inf),
            (self._top_k, _top_k, 0.0),
        ]
        for buffer, number, neutral in columns:
            values = np.full(num_rows, neutral)
            values[: len(batch)] = requests.column(number)
            copy_array(buffer, values)
        if requests.matching(has_top_k):
            return DrawKind.TOP_K
        is_cut = requests.matching(has_top_p) or requests.matching(has_min_p)
        return DrawKind.NUCLEUS if is_cut else DrawKind.ALL_TOKENS

    def draw(self, kind: DrawKind, logits: Tensor, step: Tensor) -> Tensor:
        """Draw the token of each row of logits [R, V] float32 in `step` [1] int64, on the device: [R] int64."""
        keys = self._keys.index_select(0, step)[0]
        if self._has_kernels:
            return self._draw_by_kernels(kind, logits, keys)
        scores = logits / self._factors[0][:, None]
        if kind is DrawKind.TOP_K:
            scores = self._cut_top_k(scores)
        if kind is not DrawKind.ALL_TOKENS:
            scores = torch.where(self._top_p[:, None] < 1.0, cut_nuclei(scores, self._top_p[:, None]), scores)
            scores = cut_unlikely(scores, self._log_min_p[:, None])
        noise = gumbel(keys, scores.shape[1])
        return highest(scores + noise.mul_(self._has_noise[:, None]))

    def _draw_by_kernels(self, kind: DrawKind, logits: Tensor, keys: Tensor) -> Tensor:
        # Imported here, since processes without a GPU may have no Triton.
        from engine.sampling.triton_draw import RowEdits, draw, edit
        from engine.sampling.triton_nucleus import draw_nucleus

        noise = keys, self._has_noise
        edits = RowEdits(self._factors, self._spans, self._no_ids, self._no_biases, self._no_counts)
        if kind is DrawKind.ALL_TOKENS:
            return draw(logits, noise, edits)
        if kind is DrawKind.NUCLEUS:
            return draw_nucleus(logits, noise, self._top_p, self._log_min_p, edits)
        return draw_nucleus(self._cut_top_k(edit(logits, edits)), noise, self._top_p, self._log_min_p)

    def _cut_top_k(self, scores: Tensor) -> Tensor:
        return cut_top_k(scores, self._top_k[:, None], min(MAX_TOP_K, scores.shape[1]))


def _has_noise(sampling: SamplingParams) -> float:
    return float(not sampling.is_greedy)


def _top_k(sampling: SamplingParams) -> int:
    """Return the request's `top_k`; 0 if it keeps all tokens."""
    return sampling.top_k if has_top_k(sampling) else 0

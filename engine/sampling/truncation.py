"""Temperature and the three truncations of a distribution: top-k, top-p, min-p.

Each truncation is a threshold on the scores, and scores equal to the threshold are kept. So the distribution depends
on the logits alone, not on a sort's order of equal scores, and is the same in draft, target and plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from engine.batch.indexing import runs_triton, send
from engine.sampling.logits_row import LogitsRow, RowBatch
from protos.messages import SamplingParams

_temperature, _top_k, _top_p = map(attrgetter, ("temperature", "top_k", "top_p"))


def has_temperature(sampling: SamplingParams) -> bool:
    """True if a sampled request has a temperature other than 1."""
    return not sampling.is_greedy and sampling.temperature != 1.0


def divide_by_temperature(scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """Divide each row by its temperature; `[R, V]` -> `[R, V]`."""
    return scores / _column(rows, _temperature, scores)


def has_top_k(sampling: SamplingParams) -> bool:
    """True if a sampled request has a `top_k`."""
    return not sampling.is_greedy and sampling.top_k > 0


def keep_top_k(scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """Keep the `top_k` largest scores of each row, and scores equal to the last of them; `[R, V]` -> `[R, V]`."""
    counts = np.minimum(RowBatch.of(rows).column(_top_k), scores.shape[1]).astype(np.int64)
    return cut_top_k(scores, send(torch.from_numpy(counts), scores.device)[:, None], int(counts.max()))


def cut_top_k(scores: Tensor, top_k: Tensor, most: int) -> Tensor:
    """`keep_top_k` with a `top_k` of at most `most` for each row, [R, 1] int64; 0 keeps all tokens."""
    largest = scores.topk(most).values  # [R, most], largest first
    lowest = largest.gather(1, (top_k - 1).clamp_(min=0))
    return _cut_below(scores, lowest.masked_fill(top_k == 0, -math.inf))


def has_top_p(sampling: SamplingParams) -> bool:
    """True if a sampled request has a `top_p` below 1."""
    return not sampling.is_greedy and sampling.top_p < 1.0


def keep_top_p(scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probability reaches `top_p` (arXiv:1904.09751); at least one.

    The probabilities are the softmax of the given scores, so an earlier truncation counts.
    """
    return cut_nuclei(scores, _column(rows, _top_p, scores))


def cut_nuclei(scores: Tensor, top_p: Tensor) -> Tensor:
    """`keep_top_p` with a `top_p` for each row, [R, 1]."""
    if runs_triton(scores):
        # Imported here, since processes without a GPU may have no Triton.
        from engine.sampling.triton_nucleus import nucleus_thresholds

        return _cut_below(scores, nucleus_thresholds(scores, top_p[:, 0]))
    log_total = scores.logsumexp(dim=1, keepdim=True)
    # At usual top_p the nucleus is smaller; else all are sorted.
    largest, mass = _leading_mass(scores, log_total, min(512, scores.shape[1]))  # [R, width] each
    if not bool((mass[:, -1:] >= top_p).all()):
        largest, mass = _leading_mass(scores, log_total, scores.shape[1])
    last_kept = (mass < top_p).sum(dim=1, keepdim=True).clamp_(max=largest.shape[1] - 1)  # [R, 1]
    return _cut_below(scores, largest.gather(1, last_kept))


def has_min_p(sampling: SamplingParams) -> bool:
    """True if a sampled request has a `min_p`."""
    return not sampling.is_greedy and sampling.min_p > 0.0


def keep_min_p(scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """Keep the tokens at least `min_p` times as probable as the likeliest one (arXiv:2407.01082)."""
    return cut_unlikely(scores, _column(rows, log_least_share, scores))


def cut_unlikely(scores: Tensor, log_min_p: Tensor) -> Tensor:
    """`keep_min_p` with the logarithm of a `min_p` for each row, [R, 1]."""
    return _cut_below(scores, scores.amax(dim=1, keepdim=True) + log_min_p)


def _leading_mass(scores: Tensor, log_total: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` largest scores of each row and their cumulative probabilities, `[R, width]` each."""
    largest = scores.topk(width).values
    return largest, (largest - log_total).exp().cumsum(dim=1)


def _cut_below(scores: Tensor, threshold: Tensor) -> Tensor:
    return scores.masked_fill(scores < threshold, -math.inf)


def nucleus_share(sampling: SamplingParams) -> float:
    """Return the request's `top_p`; 1 if it keeps all tokens."""
    return sampling.top_p if has_top_p(sampling) else 1.0


def log_least_share(sampling: SamplingParams) -> float:
    """Return the logarithm of the request's `min_p`; -inf if it keeps all tokens."""
    return math.log(sampling.min_p) if has_min_p(sampling) else -math.inf


def _column(rows: Seq[LogitsRow], number: Callable[[SamplingParams], float], like: Tensor) -> Tensor:
    """Return a number of each row's request, [R, 1]."""
    return send(torch.from_numpy(RowBatch.of(rows).column(number)).to(like.dtype), like.device)[:, None]

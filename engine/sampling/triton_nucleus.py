"""Finds the lowest score of each row's nucleus in one Triton launch, without a sort.

The threshold is one of the row's scores. A bisection keeps two scores around it, and moves one of them in each step to
the next score on its side of the middle: tens of steps for any row, about ten for most. The order of a row's sums does
not depend on the other rows. Import this module only if Triton is installed. TRITON_INTERPRET=1, set before the first
import, runs it on the CPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_NUM_WARPS = 32  # a row is one program: as many threads as it can have
_MAX_BOUNDED = tl.constexpr(0.999)  # nuclei up to here have a lower bound that rounding cannot reach
_NO_MASS = tl.constexpr(105.0)  # exp(-105) is 0 in float32


@triton.jit
def find_thresholds(
    thresholds,  # [R] float32
    scores,  # [R, V] float32
    top_p,  # [R] float32
    num_tokens,
    score_stride,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * score_stride
    # First pass: the highest score.
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(scores + tokens, mask=tokens < num_tokens, other=float("-inf")))
    peak = tl.max(peaks, 0)
    # All tokens more than `depth` below it have less than half of the mass that the nucleus may leave out.
    share = tl.load(top_p + row)
    depth = tl.where(share <= _MAX_BOUNDED, tl.log(2.0 * num_tokens / (1.0 - share)), _NO_MASS)
    # Second pass: the total mass, so that top_p becomes a mass, and the lowest score above that depth.
    total = tl.zeros([BLOCK], tl.float32)
    lows = tl.full([BLOCK], float("inf"), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        score = tl.load(scores + tokens, mask=tokens < num_tokens, other=float("-inf"))
        total += tl.exp(score - peak)
        lows = tl.minimum(lows, tl.where(score >= peak - depth, score, float("inf")))
    wanted = share * tl.sum(total, 0)
    low = tl.min(lows, 0)  # the mass at and above `low` is enough
    high = peak  # the mass above `high` is not enough
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        mass = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], float("inf"), tl.float32)
        below = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, num_tokens, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            score = tl.load(scores + tokens, mask=tokens < num_tokens, other=float("-inf"))
            is_above = score >= middle
            mass += tl.where(is_above, tl.exp(score - peak), 0.0)
            above = tl.minimum(above, tl.where(is_above, score, float("inf")))
            below = tl.maximum(below, tl.where(is_above, float("-inf"), score))
        is_enough = tl.sum(mass, 0) >= wanted
        low = tl.where(is_enough, tl.min(above, 0), low)
        high = tl.where(is_enough, high, tl.max(below, 0))
    tl.store(thresholds + row, low)


def nucleus_thresholds(scores: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest score of each row's nucleus, [R, 1]: the smallest set of likeliest tokens that reaches `top_p`.

    `scores` are [R, V] float32, contiguous in V; `top_p` is [R] float32. Does not wait for the device.
    """
    assert scores.stride(1) == 1, "rows must be contiguous"
    thresholds = scores.new_empty(len(scores))
    num_tokens, stride = scores.shape[1], scores.stride(0)
    with torch.cuda.device_of(scores):
        find_thresholds[(len(scores),)](
            thresholds, scores, top_p, num_tokens, stride, BLOCK=_BLOCK, num_warps=_NUM_WARPS
        )
    return thresholds[:, None]

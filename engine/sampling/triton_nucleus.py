"""Finds the lowest score of each row's nucleus in one Triton launch, without a sort.

Scores are mapped to ordered integers, and 32 bisections find the largest threshold whose tokens reach top_p. The order
of a row's sums does not depend on the other rows. Import this module only if Triton is installed. TRITON_INTERPRET=1,
set before the first import, runs it on the CPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NUM_HALVINGS = tl.constexpr(32)
_LEAST = tl.constexpr(-2139095041)  # the integer of -inf


@triton.jit
def _ordered(score):
    """Return integers with the same order as the scores."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def find_thresholds(
    thresholds,  # [R] float32
    scores,  # [R, V] float32
    top_p,  # [R] float32
    num_tokens,
    score_stride,
    BLOCK: tl.constexpr,
):
    """One program per row. The threshold is in [low, high]."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * score_stride
    # First pass: the highest score.
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(scores + tokens, mask=tokens < num_tokens, other=float("-inf")))
    peak = tl.max(peaks, 0)
    # Second pass: the total mass, so that top_p becomes a mass.
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(scores + tokens, mask=tokens < num_tokens, other=float("-inf")) - peak)
    wanted = tl.load(top_p + row) * tl.sum(total, 0)
    # Binary search over the ordered bits of float32 for the highest threshold with enough mass.
    low = tl.full([], _LEAST, tl.int64)  # the mass at and above `low` is enough
    high = _ordered(peak).to(tl.int64)  # the mass above `high` is not enough
    for _ in range(_NUM_HALVINGS):
        middle = low + (high - low + 1) // 2
        mass = tl.zeros([BLOCK], tl.float32)
        for first in range(0, num_tokens, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            score = tl.load(scores + tokens, mask=tokens < num_tokens, other=float("-inf"))
            mass += tl.where(_ordered(score).to(tl.int64) >= middle, tl.exp(score - peak), 0.0)
        is_enough = tl.sum(mass, 0) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
        high = tl.maximum(high, low)
    bits = low.to(tl.int32)
    tl.store(thresholds + row, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


def nucleus_thresholds(scores: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest score of each row's nucleus, [R, 1]: the smallest set of likeliest tokens that reaches `top_p`.

    `scores` are [R, V] float32, contiguous in V; `top_p` is [R] float32. Does not wait for the device.
    """
    assert scores.stride(1) == 1, "rows must be contiguous"
    thresholds = scores.new_empty(len(scores))
    with torch.cuda.device_of(scores):
        find_thresholds[(len(scores),)](thresholds, scores, top_p, scores.shape[1], scores.stride(0), BLOCK=_BLOCK)
    return thresholds[:, None]

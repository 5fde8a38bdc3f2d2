"""The last score of each row's nucleus, by a search in one Triton launch: no sort, and no branch on what it finds.

Scores are ordered as integers, and 32 halvings of their range find the largest threshold above which the probabilities
reach top_p. A row's sums have one order, whatever rows are beside it. Import it only where Triton is installed;
TRITON_INTERPRET=1, set before the first import, runs it on the processor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NUM_HALVINGS = tl.constexpr(32)
_LEAST = tl.constexpr(-2139095041)  # of -inf


@triton.jit
def _ordered(score):
    """Integers in the order of the scores."""
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
    """One program per row; what is below `low` is certainly out, and what is at `high` or above is certainly in."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * score_stride
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(scores + tokens, mask=tokens < num_tokens, other=float("-inf")))
    peak = tl.max(peaks, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(scores + tokens, mask=tokens < num_tokens, other=float("-inf")) - peak)
    wanted = tl.load(top_p + row) * tl.sum(total, 0)
    low = tl.full([], _LEAST, tl.int64)  # the mass from here on is enough
    high = _ordered(peak).to(tl.int64)  # and from the next integer on it is not, or none is left
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
    """Return the smallest score of each row's nucleus, [R, 1]: the smallest set of largest ones that reaches `top_p`.

    scores [R, V] float32, contiguous in V; top_p [R] float32. Nothing waits for the device.
    """
    assert scores.stride(1) == 1, "a row's numbers lie side by side"
    thresholds = scores.new_empty(len(scores))
    with torch.cuda.device_of(scores):
        find_thresholds[(len(scores),)](thresholds, scores, top_p, scores.shape[1], scores.stride(0), BLOCK=_BLOCK)
    return thresholds[:, None]

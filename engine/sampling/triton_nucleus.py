"""Draws from each row's nucleus, or finds its lowest score, in one Triton launch and without a sort.

The draw chooses among all tokens first, and adds up all likelier tokens. If their mass already reaches top_p,
the choice is outside the nucleus, and so is every token that is not likelier: it chooses again among the rest. Most
rows are done after one round.

The threshold is one of the row's scores. A bisection keeps two scores around it, and moves one of them in each step to
the next score on its side of the middle: tens of steps for any row, about ten for most.

The order of a row's sums does not depend on the other rows. Import this module only if Triton is installed.
TRITON_INTERPRET=1, set before the first import, runs it on the CPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from engine.sampling.triton_draw import NO_EDITS, RowEdits, RowNoise, edited, gumbel_of, lane_bits

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


@triton.jit
def _score(scores, tokens, row, num_rows, factors, spans, ids, biases, counts, num_tokens, count_stride):
    is_token = tokens < num_tokens
    score = tl.load(scores + tokens, mask=is_token, other=float("-inf"))
    if factors is not None:
        score = edited(score, tokens, is_token, row, num_rows, factors, spans, ids, biases, counts, count_stride)
    return score


@triton.jit
def draw_nuclei(
    drawn,  # [R] int64
    scores,  # [R, V] float32
    keys,  # the fields of `RowNoise`
    has_noise,
    top_p,  # [R] float32; 1 for all tokens
    log_min_p,  # [R] float32; -inf for all tokens
    factors,  # the fields of `RowEdits`, None if the scores need no edits
    spans,
    ids,
    biases,
    counts,
    num_tokens,
    score_stride,
    count_stride,
    BLOCK: tl.constexpr,
    HAS_LIBDEVICE: tl.constexpr,
):
    """One program per row."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    scores += row.to(tl.int64) * score_stride
    # The highest score and the mass of all tokens.
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        score = _score(scores, tokens, row, num_rows, factors, spans, ids, biases, counts, num_tokens, count_stride)
        peaks = tl.maximum(peaks, score)
    peak = tl.max(peaks, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        score = _score(scores, tokens, row, num_rows, factors, spans, ids, biases, counts, num_tokens, count_stride)
        total += tl.exp(score - peak)
    share = tl.load(top_p + row)
    wanted = tl.where(share < 1.0, share * tl.sum(total, 0), float("inf"))
    least = peak + tl.load(log_min_p + row)
    key = tl.load(keys + row)
    is_noisy = tl.load(has_noise + row) != 0
    pivot = tl.full([], float("-inf"), tl.float32)  # tokens up to here are outside the nucleus
    token = tl.full([], 0, tl.int32)
    is_searching = True
    while is_searching:
        # Choose among the tokens above the pivot: the best of each lane, then the best of all, the lowest id if equal.
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        places = tl.zeros([BLOCK], tl.int32) + num_tokens
        own = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, num_tokens, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            score = _score(scores, tokens, row, num_rows, factors, spans, ids, biases, counts, num_tokens, count_stride)
            noisy = score
            if is_noisy:
                noisy += gumbel_of(lane_bits(key, tokens), HAS_LIBDEVICE)
            is_better = (score > pivot) & (score >= least) & (noisy > best)
            best = tl.where(is_better, noisy, best)
            places = tl.where(is_better, tokens, places)
            own = tl.where(is_better, score, own)
        token = tl.min(tl.where(best == tl.max(best, 0), places, num_tokens), 0)
        chosen = tl.max(tl.where(places == token, own, float("-inf")), 0)
        # Add up all likelier tokens; sums that are not finite end the search.
        mass = tl.zeros([BLOCK], tl.float32)
        for first in range(0, num_tokens, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            score = _score(scores, tokens, row, num_rows, factors, spans, ids, biases, counts, num_tokens, count_stride)
            mass += tl.where(score > chosen, tl.exp(score - peak), 0.0)
        is_searching = (tl.sum(mass, 0) >= wanted) & (chosen < peak)
        pivot = chosen
    tl.store(drawn + row, tl.where(token < num_tokens, token, 0).to(tl.int64))


def draw_nucleus(
    scores: Tensor, noise: RowNoise, top_p: Tensor, log_min_p: Tensor, edits: RowEdits | None = None
) -> Tensor:
    """Return the token of each row's nucleus with the highest score plus noise, `[R] int64`; the lowest id if equal.

    `scores` [R, V], `edits` and `noise` are as in `triton_draw.draw`; `top_p` and `log_min_p` are [R] float32. Does not
    wait for the device.
    """
    assert scores.stride(1) == 1, "rows must be contiguous"
    num_rows, num_tokens = scores.shape
    drawn = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    with torch.cuda.device_of(scores):
        draw_nuclei[(num_rows,)](
            drawn,
            scores,
            *noise,
            top_p,
            log_min_p,
            *(edits or NO_EDITS),
            num_tokens,
            scores.stride(0),
            0 if edits is None else edits.counts.shape[1],
            BLOCK=4096,
            HAS_LIBDEVICE=not knobs.runtime.interpret,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
    return drawn


def nucleus_thresholds(scores: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest score of each row's nucleus, [R, 1]: the smallest set of likeliest tokens that reaches `top_p`.

    `scores` are [R, V] float32, contiguous in V; `top_p` is [R] float32. Does not wait for the device.
    """
    assert scores.stride(1) == 1, "rows must be contiguous"
    thresholds = scores.new_empty(len(scores))
    num_tokens, stride = scores.shape[1], scores.stride(0)
    with torch.cuda.device_of(scores):
        find_thresholds[(len(scores),)](thresholds, scores, top_p, num_tokens, stride, BLOCK=8192, num_warps=_NUM_WARPS)
    return thresholds[:, None]

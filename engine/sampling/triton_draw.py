"""The draw of a token per row in one Triton launch: noise, its sum with the scores, and the largest, block by block.

It computes `engine.sampling.noise.gumbel` where it is used, so that no [R, V] noise is ever in memory; the integers are
those of the contract, bit for bit. Import it only where Triton is installed. TRITON_INTERPRET=1, set before the first
import, runs it on the processor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import libdevice

_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-63)
_MIN_UNIFORM = tl.constexpr(2.0**-64)
_MAX_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
_BLOCK = 1024


@triton.jit
def lane_bits(key, lane):
    """SplitMix64 of a key and its lanes, uint64; `engine.sampling.noise` has the same in int64."""
    x = key.to(tl.uint64, bitcast=True) + (lane + 1).to(tl.uint64) * _GOLDEN_GAMMA
    x = (x ^ (x >> 30)) * _MULTIPLIER_1
    x = (x ^ (x >> 27)) * _MULTIPLIER_2
    return x ^ (x >> 31)


@triton.jit
def gumbel_of(bits, HAS_LIBDEVICE: tl.constexpr):
    """Standard Gumbel noise of 64 random bits, as `engine.sampling.noise` has it: -log(-log(1 - u))."""
    u = (bits >> 1).to(tl.int64, bitcast=True).to(tl.float32) * _UNIT
    u = tl.minimum(tl.maximum(u, _MIN_UNIFORM), _MAX_UNIFORM)
    if HAS_LIBDEVICE:
        return -libdevice.log(-libdevice.log1p(-u))
    # The interpreter has no log1p: log(w) u / (1 - w), where w is 1 - u as it was rounded, is as good.
    w = 1.0 - u
    return -tl.log(tl.where(w == 1.0, u, -tl.log(w) * (u / tl.where(w == 1.0, 1.0, 1.0 - w))))


@triton.jit
def draw_blocks(
    peaks,  # [R, blocks] float32: the largest of each block
    places,  # [R, blocks] int32: its token, the lowest where several are as large
    scores,  # [R, V] float32
    keys,  # [R] int64
    has_noise,  # [R] int8: 0 of greedy rows
    num_tokens,
    score_stride,
    BLOCK: tl.constexpr,
    HAS_LIBDEVICE: tl.constexpr,
):
    """One program per row and block of tokens."""
    row, block = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    score = tl.load(scores + row.to(tl.int64) * score_stride + tokens, mask=is_token, other=float("-inf"))
    if tl.load(has_noise + row) != 0:
        score += gumbel_of(lane_bits(tl.load(keys + row), tokens), HAS_LIBDEVICE)
    peak = tl.max(score, 0)
    place = tl.min(tl.where(is_token & (score == peak), tokens, num_tokens), 0)
    at = row * tl.num_programs(1) + block
    tl.store(peaks + at, peak)
    tl.store(places + at, place)


def draw(scores: Tensor, keys: Tensor, has_noise: Tensor) -> Tensor:
    """Return the token of each row with the highest score plus noise, `[R] int64`; the lowest id among equals.

    scores [R, V] float32, contiguous in V; keys [R] int64; has_noise [R] int8. Nothing waits for the device.
    """
    assert scores.stride(1) == 1, "a row's numbers lie side by side"
    num_rows, num_tokens = scores.shape
    num_blocks = triton.cdiv(num_tokens, _BLOCK)
    peaks = scores.new_empty(num_rows, num_blocks)
    places = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=scores.device)
    with torch.cuda.device_of(scores):
        draw_blocks[(num_rows, num_blocks)](
            peaks,
            places,
            scores,
            keys,
            has_noise,
            num_tokens,
            scores.stride(0),
            BLOCK=_BLOCK,
            HAS_LIBDEVICE=not knobs.runtime.interpret,
        )
    # Not argmax: among equals a GPU's may return any.
    return places.masked_fill_(peaks < peaks.amax(dim=1, keepdim=True), num_tokens).amin(dim=1).long()

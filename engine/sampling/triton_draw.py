"""Computes the scores and tokens of rows in one Triton launch: penalties, bias, temperature, noise, maximum per block.

`draw` computes all of them in registers, so scores and noise are never stored in memory. `edit` stores the scores,
for rows that a grammar or a truncation changes afterwards. The noise's integers are bit-identical to
`engine.sampling.noise`, and the scores to the CPU's: divisions are rounded as in IEEE, and products are not fused with
sums. Import this module only if Triton is installed. TRITON_INTERPRET=1, set before the first import, runs it on the
CPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import libdevice

from engine.batch.indexing import send_arrays
from engine.sampling.logits_row import RowBatch, temperature_of
from engine.sampling.masks import has_bias
from engine.sampling.penalties import IN_PROMPT, TokenCounts, has_penalties
from protos.messages import SamplingParams

_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-63)
_MIN_UNIFORM = tl.constexpr(2.0**-64)
_MAX_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_BLOCK = 1024
NO_EDITS = (None,) * 5
_NO_NOISE = (None, None)


class RowEdits(NamedTuple):
    """Each row's changes that depend on one score at a time, on the device of the logits.

    `ids` concatenates, per run, the drafts of runs with penalties and the tokens of biases.
    """

    factors: Tensor  # [4, R] float32: temperatures; repetition, frequency and presence penalties
    spans: Tensor  # [5, R] int32: line of `counts` or -1; then [first, end) in `ids` of drafts, and of biases
    ids: Tensor  # [N] int32
    biases: Tensor  # [N] float32; 0 for drafts
    counts: Tensor  # [lines, V + 1] int32, of `TokenCounts`


# The noise of each row, on the device of its scores: keys, [R] int64, and [R] int8, which are 0 for greedy rows.
RowNoise = tuple[Tensor, Tensor]


def edits_of(rows: RowBatch, logits: Tensor, counts: TokenCounts) -> RowEdits | None:
    """Return the changes that the rows of `logits` [R, V] need; None if they need no change."""
    requests = rows.requests
    penalized, biased = requests.matching(has_penalties), requests.matching(has_bias)
    if not (penalized or biased or (requests.column(temperature_of) != 1.0).any()):
        return None
    # Penalized runs get a row of token counts.
    table, lines = counts.count([rows.firsts[run] for run in penalized], logits)
    line_of_run = dict(zip(penalized, lines, strict=True))
    listed_ids: list[int] = []
    listed_biases: list[float] = []
    columns = np.zeros((len(requests.samplings), 5), np.int32)
    columns[:, 0] = -1
    # Each run lists its drafts, then its biases, as slices of two flat lists.
    for run in sorted({*penalized, *biased}):
        first_draft = len(listed_ids)
        listed_ids += rows.drafts_of(run) if run in line_of_run else ()
        first_bias = len(listed_ids)
        listed_biases += [0.0] * (first_bias - first_draft)
        for token_id, bias in requests.samplings[run].logit_bias:
            listed_ids.append(token_id)
            listed_biases.append(bias)
        columns[run] = line_of_run.get(run, -1), first_draft, first_draft, first_bias, len(listed_ids)
    # Expand runs to rows: row k of a run also counts its first k drafts.
    columns_of_row = columns.T[:, rows.run_of_row]
    columns_of_row[2] += rows.num_drafts.astype(np.int32)
    factors_of_row = requests.column(_factors).astype(np.float32).T[:, rows.run_of_row]
    arrays = (factors_of_row, columns_of_row, np.array(listed_ids, np.int32), np.array(listed_biases, np.float32))
    factors, spans, ids, biases = send_arrays(arrays, logits.device)
    return RowEdits(factors, spans, ids, biases, table)


@triton.jit
def lane_bits(key, lane):
    """Return SplitMix64 of a key and its lanes, uint64; `engine.sampling.noise` has the same in int64."""
    x = key.to(tl.uint64, bitcast=True) + (lane + 1).to(tl.uint64) * _GOLDEN_GAMMA
    x = (x ^ (x >> 30)) * _MULTIPLIER_1
    x = (x ^ (x >> 27)) * _MULTIPLIER_2
    return x ^ (x >> 31)


@triton.jit
def gumbel_of(bits, HAS_LIBDEVICE: tl.constexpr):
    """Return standard Gumbel noise of 64 random bits, as in `engine.sampling.noise`: -log(-log(1 - u))."""
    u = (bits >> 1).to(tl.int64, bitcast=True).to(tl.float32) * _UNIT
    u = tl.minimum(tl.maximum(u, _MIN_UNIFORM), _MAX_UNIFORM)
    if HAS_LIBDEVICE:
        return -libdevice.log(-libdevice.log1p(-u))
    # The interpreter has no log1p. With w = 1 - u rounded, log(w) u / (1 - w) is as accurate.
    w = 1.0 - u
    return -tl.log(tl.where(w == 1.0, u, -tl.log(w) * (u / tl.where(w == 1.0, 1.0, 1.0 - w))))


@triton.jit
def edited(score, tokens, is_token, row, num_rows, factors, spans, ids, biases, counts, count_stride):
    """Apply a row's penalties, bias and temperature to its scores, in this order."""
    line = tl.load(spans + row)
    if line >= 0:
        count = tl.load(counts + line.to(tl.int64) * count_stride + tokens, mask=is_token, other=0)
        for at in range(tl.load(spans + num_rows + row), tl.load(spans + 2 * num_rows + row)):
            count += (tokens == tl.load(ids + at)).to(tl.int32)
        repetition = tl.load(factors + num_rows + row)
        repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
        score = tl.where(count > 0, repeated, score)
        generated = (count & (_IN_PROMPT - 1)).to(tl.float32)
        score = score - tl.load(factors + 2 * num_rows + row) * generated
        score = score - tl.load(factors + 3 * num_rows + row) * (generated > 0).to(tl.float32)
    for at in range(tl.load(spans + 3 * num_rows + row), tl.load(spans + 4 * num_rows + row)):
        score = tl.where(tokens == tl.load(ids + at), score + tl.load(biases + at), score)
    return tl.div_rn(score, tl.load(factors + row))


@triton.jit
def edit_blocks(
    out,  # [R, V] float32
    scores,  # [R, V] float32
    factors,  # the fields of `RowEdits`
    spans,
    ids,
    biases,
    counts,
    num_tokens,
    score_stride,
    count_stride,
    BLOCK: tl.constexpr,
):
    """One program per row and block of tokens."""
    row, block = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    score = tl.load(scores + row.to(tl.int64) * score_stride + tokens, mask=is_token, other=float("-inf"))
    score = edited(score, tokens, is_token, row, tl.num_programs(0), factors, spans, ids, biases, counts, count_stride)
    tl.store(out + row.to(tl.int64) * num_tokens + tokens, score, mask=is_token)


@triton.jit
def draw_blocks(
    peaks,  # [R, blocks] float32: the largest of each block
    places,  # [R, blocks] int32: its token, the lowest id among equals
    scores,  # [R, V] float32
    keys,  # the fields of `RowNoise`, None if no row has noise
    has_noise,
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
    """One program per row and block of tokens."""
    row, block = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    score = tl.load(scores + row.to(tl.int64) * score_stride + tokens, mask=is_token, other=float("-inf"))
    if factors is not None:
        score = edited(
            score, tokens, is_token, row, tl.num_programs(0), factors, spans, ids, biases, counts, count_stride
        )
    if keys is not None:  # noqa: SIM102  # Triton computes both sides of `and`
        if tl.load(has_noise + row) != 0:
            score += gumbel_of(lane_bits(tl.load(keys + row), tokens), HAS_LIBDEVICE)
    peak = tl.max(score, 0)
    place = tl.min(tl.where(is_token & (score == peak), tokens, num_tokens), 0)
    at = row * tl.num_programs(1) + block
    tl.store(peaks + at, peak)
    tl.store(places + at, place)


@triton.jit
def pick_tokens(
    tokens,  # [R] int64
    peaks,  # [R, blocks], as `draw_blocks` left them
    places,
    num_blocks,
    num_tokens,
    BLOCK: tl.constexpr,
):
    """One program per row: the token of the highest peak, the lowest id among equals."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    is_block = block < num_blocks
    peak = tl.load(peaks + row * num_blocks + block, mask=is_block, other=float("-inf"))
    place = tl.load(places + row * num_blocks + block, mask=is_block, other=num_tokens)
    token = tl.min(tl.where(peak == tl.max(peak, 0), place, num_tokens), 0)
    tl.store(tokens + row, tl.where(token < num_tokens, token, 0).to(tl.int64))  # a row of NaN has no highest


def edit(logits: Tensor, edits: RowEdits) -> Tensor:
    """Return the scores of `logits` [R, V] float32, contiguous in V, after their edits, without waiting."""
    assert logits.stride(1) == 1, "rows must be contiguous"
    scores = torch.empty_like(logits, memory_format=torch.contiguous_format)
    num_rows, num_tokens = logits.shape
    with torch.cuda.device_of(logits):
        edit_blocks[(num_rows, triton.cdiv(num_tokens, _BLOCK))](
            scores,
            logits,
            *edits,
            num_tokens,
            logits.stride(0),
            edits.counts.shape[1],
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
    return scores


def draw(scores: Tensor, noise: RowNoise | None = None, edits: RowEdits | None = None) -> Tensor:
    """Return the token of each row with the highest score plus noise, `[R] int64`; the lowest id among equals.

    `scores` are [R, V] float32, contiguous in V. With `edits`, they are logits without these edits. Does not wait for
    the device.
    """
    assert scores.stride(1) == 1, "rows must be contiguous"
    num_rows, num_tokens = scores.shape
    num_blocks = triton.cdiv(num_tokens, _BLOCK)
    peaks = scores.new_empty(num_rows, num_blocks)
    places = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=scores.device)
    # The best token of each block of tokens.
    with torch.cuda.device_of(scores):
        draw_blocks[(num_rows, num_blocks)](
            peaks,
            places,
            scores,
            *(noise or _NO_NOISE),
            *(edits or NO_EDITS),
            num_tokens,
            scores.stride(0),
            0 if edits is None else edits.counts.shape[1],
            BLOCK=_BLOCK,
            HAS_LIBDEVICE=not knobs.runtime.interpret,
            enable_fp_fusion=False,
        )
        tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
        pick_tokens[(num_rows,)](
            tokens, peaks, places, num_blocks, num_tokens, BLOCK=triton.next_power_of_2(num_blocks), num_warps=1
        )
    return tokens


def _factors(sampling: SamplingParams) -> Seq[float]:
    return temperature_of(sampling), sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty

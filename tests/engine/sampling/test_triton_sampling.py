"""Triton's draw and nucleus equal torch's: the bits follow the contract, and the tokens equal the CPU's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl

from engine.sampling import sampler as sampler_module
from engine.sampling import truncation
from engine.sampling.logits_row import ChainRows, LogitsRow, RowBatch
from engine.sampling.noise import Purpose, _gumbel_of, _lane_bits, gumbel, key_prefixes, noise_keys
from engine.sampling.penalties import TokenCounts
from engine.sampling.sampler import Sampler
from engine.sampling.triton_draw import RowNoise, draw, edit, edits_of, gumbel_of, lane_bits
from engine.sampling.triton_nucleus import draw_nucleus, nucleus_thresholds
from protos.messages import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_TOKENS = 2500  # neither a multiple of a block nor less than two


@triton.jit
def write_noise(bits, noise, keys, num_lanes, BLOCK: tl.constexpr, HAS_LIBDEVICE: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = lane_bits(tl.load(keys + tl.program_id(0)), lanes)
    at = tl.program_id(0) * num_lanes + lanes
    tl.store(bits + at, values.to(tl.int64, bitcast=True), mask=lanes < num_lanes)
    tl.store(noise + at, gumbel_of(values, HAS_LIBDEVICE), mask=lanes < num_lanes)


def keys_of(num_rows: int) -> torch.Tensor:
    seeds = [(-1) ** row * (row * 7919 + (row << 55)) for row in range(num_rows)]
    prefixes = key_prefixes(seeds, range(num_rows))
    return noise_keys(prefixes, np.arange(5, 5 + num_rows), Purpose.TARGET_GUMBEL, DEVICE)


def test_bits_are_the_contracts_and_noise_is_as_good_as_its_logarithms() -> None:
    keys = keys_of(6)
    bits = torch.empty(6, 1000, dtype=torch.int64, device=DEVICE)
    noise = torch.empty(6, 1000, device=DEVICE)
    write_noise[(6,)](bits, noise, keys, 1000, BLOCK=1024, HAS_LIBDEVICE=DEVICE.type == "cuda")
    expected = _lane_bits(keys[:, None], torch.arange(1000, device=DEVICE))
    assert torch.equal(bits, expected)
    torch.testing.assert_close(noise, _gumbel_of(expected.clone()), rtol=2e-6, atol=2e-6)


def test_tokens_are_those_of_scores_plus_noise_and_greedy_rows_get_none() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = (3 * torch.randn(12, NUM_TOKENS, generator=generator)).to(DEVICE)
    scores[:, torch.randperm(NUM_TOKENS, generator=generator)[:2000]] = float("-inf")
    keys = keys_of(12)
    has_noise = torch.tensor([1, 0, 1] * 4, dtype=torch.int8, device=DEVICE)
    expected = scores + gumbel(keys, NUM_TOKENS) * has_noise[:, None]
    top = expected.topk(2).values
    assert bool((top[:, 0] - top[:, 1] > 1e-4).all()), "no row hangs on a logarithm's last bits"
    assert torch.equal(draw(scores, (keys, has_noise)), expected.argmax(dim=1))


def test_among_equals_the_lowest_id_is_drawn_across_blocks_too() -> None:
    scores = torch.zeros(3, NUM_TOKENS, device=DEVICE)
    scores[1, 2000] = scores[1, 30] = scores[1, 1500] = 1.0
    scores[2] = float("-inf")
    greedy = (keys_of(3), torch.zeros(3, dtype=torch.int8, device=DEVICE))
    for noise in (greedy, None):
        assert draw(scores, noise).tolist() == [0, 30, 0]


def test_rows_may_lie_apart_in_memory() -> None:
    wide = torch.randn(4, 2 * NUM_TOKENS, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    part = wide[:, :NUM_TOKENS]
    noise = (keys_of(4), torch.ones(4, dtype=torch.int8, device=DEVICE))
    assert torch.equal(draw(part, noise), draw(part.contiguous(), noise))


GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7, seed=2)
BIASED = SamplingParams(temperature=1.3, seed=3, logit_bias=((3, 1.5), (3, -0.25), (2499, 9.0), (NUM_TOKENS, 90.0)))
PENALIZED = replace(
    WARM, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=-0.7, logit_bias=((5, 6.0), (9, 1.0))
)
REPEATING = SamplingParams(temperature=0.0, repetition_penalty=0.8)
TEXT = [5, 9, 9, 5, 2400, 2400, 2400, 7, NUM_TOKENS + 3]


def mixed_rows(text: list[int], *more: LogitsRow) -> RowBatch:
    """Rows of chains, of a tree's path, and single rows. Some have no parameters set; some follow `text`."""
    chains = [
        ChainRows(LogitsRow(PENALIZED, text, 3), (7, 7, 2600)),
        ChainRows(LogitsRow(GREEDY, [1, 2], 1), (4,)),
        ChainRows(LogitsRow(REPEATING, [*TEXT, 11], 9), (11, 12)),
    ]
    alone = [LogitsRow(WARM, TEXT, 3), LogitsRow(BIASED, TEXT, 3), LogitsRow(PENALIZED, text, 3, 1, (8, 8))]
    return RowBatch([*chains, [*alone, *more]])


def logits_of(rows: RowBatch) -> torch.Tensor:
    logits = 3 * torch.randn(len(rows), NUM_TOKENS, generator=torch.Generator().manual_seed(8))
    logits[:, 20:1500:3] = float("-inf")
    return logits.to(DEVICE)


def test_scores_behind_penalties_bias_and_temperature_have_the_processors_bits() -> None:
    text = list(TEXT)
    rows, counts = mixed_rows(text), TokenCounts()
    logits = logits_of(rows)
    for _ in range(2):
        edits = edits_of(rows, logits, counts)
        assert edits is not None
        expected = Sampler().apply_processors(logits.cpu(), rows)
        assert torch.equal(edit(logits, edits).cpu(), expected)
        assert not torch.equal(logits.cpu(), expected)
        text.extend([9, 12])  # committed after the first step


def test_rows_that_ask_for_nothing_have_no_edits() -> None:
    rows = RowBatch([[LogitsRow(GREEDY, [1, 2], 1), LogitsRow(SamplingParams(seed=1), [1, 2], 1)]])
    assert edits_of(rows, logits_of(rows), TokenCounts()) is None


CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"min_p": 0.05},
    {"top_p": 0.3},
    {"top_p": 0.95, "min_p": 0.001},
    {"top_k": 9, "top_p": 0.8},
    {"top_p": 0.7, "min_tokens": 20, "stop_token_ids": (5,)},
)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_draw_is_the_processors_whatever_is_cut_behind_the_edits(
    monkeypatch: pytest.MonkeyPatch, cut: dict[str, Any]
) -> None:
    rows = mixed_rows(TEXT, *(LogitsRow(replace(PENALIZED, **cut), TEXT, 3, index) for index in range(3)))
    logits = logits_of(rows)
    expected = Sampler().draw(logits.cpu(), rows)
    for module in (sampler_module, truncation):
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    assert torch.equal(Sampler().draw(logits, rows).cpu(), expected)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_the_nucleus_is_the_smallest_that_reaches_top_p(top_p: float) -> None:
    generator = torch.Generator().manual_seed(11)
    scores = 2 * torch.randn(8, 6000, generator=generator)
    scores[1] = 0.0  # all equal: the threshold keeps all of them
    scores[2, 1:] = float("-inf")
    scores[3, ::2] = float("-inf")
    scores[4] -= 1000.0
    limits = torch.full((8,), top_p, device=DEVICE)
    thresholds = nucleus_thresholds(scores.to(DEVICE), limits).cpu()
    probs = scores.double().softmax(dim=1)
    rounding = 1e-6  # of sums in float32
    assert bool((probs.where(scores >= thresholds, 0.0).sum(dim=1) > top_p - rounding).all())
    assert bool((probs.where(scores > thresholds, 0.0).sum(dim=1) < top_p + rounding).all())
    assert bool((scores == thresholds).any(dim=1).all())


def noisy_rows(num_rows: int) -> RowNoise:
    return (keys_of(num_rows), torch.ones(num_rows, dtype=torch.int8, device=DEVICE))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
def test_a_draw_from_the_nucleus_is_the_draw_from_what_the_threshold_keeps(top_p: float) -> None:
    generator = torch.Generator().manual_seed(12)
    scores = (2 * torch.randn(40, NUM_TOKENS, generator=generator)).to(DEVICE)
    scores[1] = 0.0  # all equal: all are kept
    scores[2, 1:] = float("-inf")
    scores[3, ::2] = float("-inf")
    limits, none = torch.full((40,), top_p, device=DEVICE), torch.full((40,), float("-inf"), device=DEVICE)
    kept = scores
    if top_p < 1.0:
        kept = scores.masked_fill(scores < nucleus_thresholds(scores, limits), float("-inf"))
    drawn = draw_nucleus(scores, noisy_rows(40), limits, none)
    assert torch.equal(drawn, draw(kept, noisy_rows(40)))
    assert top_p > 0.9 or not torch.equal(drawn, draw(scores, noisy_rows(40)))


def test_rows_without_limits_or_noise_are_drawn_as_alone() -> None:
    scores = (2 * torch.randn(12, NUM_TOKENS, generator=torch.Generator().manual_seed(13))).to(DEVICE)
    noise = (keys_of(12), torch.tensor([1, 0, 1] * 4, dtype=torch.int8, device=DEVICE))
    limits = torch.tensor([1.0, 1.0, 0.2] * 4, device=DEVICE)
    none = torch.full((12,), float("-inf"), device=DEVICE)
    drawn, whole = draw_nucleus(scores, noise, limits, none), draw(scores, noise)
    assert torch.equal(drawn.view(4, 3)[:, :2], whole.view(4, 3)[:, :2])
    assert torch.equal(drawn.view(4, 3)[:, 1], scores.argmax(dim=1).view(4, 3)[:, 1])


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_ends_with_a_token(fault: float) -> None:
    scores = torch.zeros(3, NUM_TOKENS, device=DEVICE)
    scores[0, 5], scores[1] = fault, fault
    limits, none = torch.full((3,), 0.5, device=DEVICE), torch.full((3,), float("-inf"), device=DEVICE)
    drawn = draw_nucleus(scores, noisy_rows(3), limits, none)
    assert bool(((drawn >= 0) & (drawn < NUM_TOKENS)).all())

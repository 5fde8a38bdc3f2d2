"""The draw and the nucleus by Triton are those by torch: bits are the contract's, tokens those of the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from engine.sampling.noise import Purpose, _gumbel_of, _lane_bits, gumbel, noise_keys
from engine.sampling.triton_draw import draw, gumbel_of, lane_bits
from engine.sampling.triton_nucleus import nucleus_thresholds

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
    return noise_keys(seeds, range(num_rows), range(5, 5 + num_rows), Purpose.TARGET_GUMBEL, DEVICE)


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
    assert torch.equal(draw(scores, keys, has_noise), expected.argmax(dim=1))


def test_among_equals_the_lowest_id_is_drawn_across_blocks_too() -> None:
    scores = torch.zeros(3, NUM_TOKENS, device=DEVICE)
    scores[1, 2000] = scores[1, 30] = scores[1, 1500] = 1.0
    scores[2] = float("-inf")
    greedy = torch.zeros(3, dtype=torch.int8, device=DEVICE)
    assert draw(scores, keys_of(3), greedy).tolist() == [0, 30, 0]


def test_rows_may_lie_apart_in_memory() -> None:
    wide = torch.randn(4, 2 * NUM_TOKENS, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    part = wide[:, :NUM_TOKENS]
    noisy = torch.ones(4, dtype=torch.int8, device=DEVICE)
    assert torch.equal(draw(part, keys_of(4), noisy), draw(part.contiguous(), keys_of(4), noisy))


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


def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    script = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.sampling.triton_draw import draw_blocks
from engine.sampling.triton_nucleus import find_thresholds
numbers = {"num_tokens": "i32", "score_stride": "i32"}
draw = {"peaks": "*fp32", "places": "*i32", "scores": "*fp32", "keys": "*i64", "has_noise": "*i8", **numbers}
nucleus = {"thresholds": "*fp32", "scores": "*fp32", "top_p": "*fp32", **numbers}
for kernel, types, constants in (
    (draw_blocks, draw, {"BLOCK": 1024, "HAS_LIBDEVICE": True}), (find_thresholds, nucleus, {"BLOCK": 4096})
):
    source = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, check=True, timeout=150)

"""The randomness contract: fixed, the same on all devices, and random."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling.noise import Purpose, _gumbel_of, gumbel, key_prefixes, noise_keys, random_bits, uniform

MASK = (1 << 64) - 1
ALPHA = 1e-6


def keys_at(
    seeds: Iterable[int],
    sample_indices: Iterable[int],
    positions: Iterable[int],
    purpose: Purpose,
    device: torch.device | None = None,
) -> Tensor:
    return noise_keys(key_prefixes(seeds, sample_indices), np.array([*positions]), purpose, device)


def keys_of(
    seed: int = 0, sample_index: int = 0, position: int = 0, purpose: Purpose = Purpose.TARGET_GUMBEL
) -> Tensor:
    return keys_at([seed], [sample_index], [position], purpose)


# ---- the contract -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "key", "u", "first_lanes"),
    [
        ((0, 0, 0, 0), 2391539541053276776, 0.47141042966848024, [0.450134, -0.254707, 1.018838, 0.994575]),
        ((1, 0, 17, 0), 2687922861300351531, 0.295984624925524, [1.047097, 1.210166, 0.095813, 0.398221]),
        ((-1, 2, 4095, 1), -3717608056763467323, 0.2938212570379809, [1.055878, -0.669863, -0.873858, 0.888901]),
        ((-(2**63), 1, 3, 2), 2783835306967951508, 0.05290212102067704, [2.912259, -1.080647, -0.310857, 0.271789]),
    ],
)
def test_golden_values(place: tuple[int, int, int, int], key: int, u: float, first_lanes: list[float]) -> None:
    """Changing these changes the output of every seeded request and splits drafts from targets of another version."""
    keys = keys_of(*place[:3], Purpose(place[3]))
    assert keys.tolist() == [key]
    assert uniform(keys).tolist() == [u]
    assert random_bits(keys, 16).tolist() == [int(u * 65536)]
    assert gumbel(keys, 4)[0].tolist() == pytest.approx(first_lanes, abs=2e-6)


def test_purposes_keep_their_numbers() -> None:
    assert [(purpose.name, purpose.value) for purpose in Purpose] == [
        ("TARGET_GUMBEL", 0),
        ("DRAFT", 1),
        ("ACCEPT", 2),
        ("RESIDUAL", 3),
    ]


def slow_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def slow_bits(words: tuple[int, ...], lane: int) -> int:
    key = 0
    for word in words:
        key = slow_mix((key + word + 0x9E3779B97F4A7C15) & MASK)
    return slow_mix((key + (lane + 1) * 0x9E3779B97F4A7C15) & MASK)


def keys_of_places(places: Iterable[tuple[int, int, int]], purpose: Purpose) -> Tensor:
    """The keys of (seed, sample index, position) triples, `[n] int64`."""
    seeds, sample_indices, positions = zip(*places, strict=True)
    return keys_at(seeds, sample_indices, positions, purpose)


def test_numbers_equal_those_of_unbounded_integers() -> None:
    """int64 arithmetic that wraps, with logical shifts, against Python's integers."""
    places = [(seed, index, position) for seed in (0, -1, 2**63, 3**50) for index in (0, 7) for position in (0, 9999)]
    keys = keys_of_places(places, Purpose.ACCEPT)
    expected = [slow_bits((seed & MASK, index, position, Purpose.ACCEPT), 0) >> 11 for seed, index, position in places]
    assert [int(value * 2**53) for value in uniform(keys).tolist()] == expected
    lanes = [0, 1, 5000, 150_000]
    noise = gumbel(keys, lanes[-1] + 1)[:, lanes]
    for (seed, index, position), row in zip(places, noise.tolist(), strict=True):
        for lane, value in zip(lanes, row, strict=True):
            u = (slow_bits((seed & MASK, index, position, Purpose.ACCEPT), lane) >> 1) / 2**63
            assert value == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-5, abs=1e-5)


def test_a_lane_of_each_key_is_one_number_for_every_kind_of_draw() -> None:
    keys = keys_at([5, 5, -9], [0, 0, 1], [17, 17, 4], Purpose.ACCEPT)
    lanes = torch.tensor([0, 1, 63])
    places = [(5, 0, 17, 2), (5, 0, 17, 2), (-9 & MASK, 1, 4, 2)]
    bits = [slow_bits(place, lane) for place, lane in zip(places, lanes.tolist(), strict=True)]
    assert [int(value * 2**53) for value in uniform(keys, lanes).tolist()] == [word >> 11 for word in bits]
    assert random_bits(keys, 16, lanes).tolist() == [word >> 48 for word in bits]
    assert uniform(keys, 0).tolist() == uniform(keys).tolist()


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert keys_of(-1).tolist() == keys_of(2**64 - 1).tolist() == keys_of(2**65 - 1).tolist()


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    keys = keys_at(range(40), range(40), range(40), Purpose.TARGET_GUMBEL)
    batch = gumbel(keys, 5000)  # many chunks on a CPU
    assert torch.equal(batch[17:18], gumbel(keys[17:18], 5000))
    assert torch.equal(batch[:, :77], gumbel(keys, 77))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_what_a_cpu_draws() -> None:
    places = (range(-8, 8), range(16), range(16))
    here = keys_at(*places, Purpose.DRAFT)
    there = keys_at(*places, Purpose.DRAFT, torch.device("cuda"))
    assert torch.equal(here, there.cpu())
    assert torch.equal(uniform(here), uniform(there).cpu())
    assert torch.equal(random_bits(here, 16), random_bits(there, 16).cpu())
    torch.testing.assert_close(gumbel(here, 9000), gumbel(there, 9000).cpu(), rtol=1e-6, atol=1e-6)


# ---- the tail -----------------------------------------------------------------------------------------------------


def test_noise_is_finite_at_every_word() -> None:
    extremes = torch.tensor([0, 1, 2, 3, -1, -2, 2**63 - 1, -(2**63)])
    noise = _gumbel_of(extremes)
    assert bool(noise.isfinite().all())
    assert noise[0] == noise.max()


def test_the_upper_tail_is_resolved_far_beyond_float32_uniforms() -> None:
    """A uniform float32 in [0, 1) ends at -log(2**-24) = 16.6; here noise of 17 and more keeps 24 significant bits."""
    words = torch.tensor([2**k for k in range(1, 45)])
    noise = _gumbel_of(words)
    expected = torch.tensor([-math.log(-math.log1p(-(2.0 ** (k - 64)))) for k in range(1, 45)])
    torch.testing.assert_close(noise, expected.float(), rtol=1e-6, atol=0.0)
    assert len(set(noise.tolist())) == 44


# ---- the statistics -----------------------------------------------------------------------------------------------


def uniforms_along(axis: str, count: int, start: int = 0) -> Tensor:
    """`count` uniforms whose places differ in one coordinate by steps of one."""
    if axis == "lane":
        return gumbel_as_uniform(keys_of(start + 5), count)[0]
    zeros, steps = [0] * count, list(range(start, start + count))
    places = {"seed": (steps, zeros, zeros), "sample": (zeros, steps, zeros), "position": (zeros, zeros, steps)}[axis]
    return uniform(keys_at(*places, Purpose.ACCEPT))


def gumbel_as_uniform(keys: Tensor, num_lanes: int) -> Tensor:
    return (-(-gumbel(keys, num_lanes).double()).exp()).exp()


def chi_square_p_value(cells: Tensor, num_cells: int) -> float:
    counts = torch.bincount(cells, minlength=num_cells).double()
    expected = len(cells) / num_cells
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((num_cells - 1) / 2).double(), statistic / 2))


AXES = ["lane", "seed", "sample", "position"]


@pytest.mark.parametrize("axis", AXES)
def test_numbers_are_uniform_along_every_axis(axis: str) -> None:
    u = uniforms_along(axis, 100_000)
    assert chi_square_p_value((u * 1000).long().clamp(max=999), 1000) > ALPHA


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_independent_along_every_axis(axis: str, lag: int) -> None:
    u = (uniforms_along(axis, 100_000 + lag) * 32).long().clamp(max=31)
    assert chi_square_p_value(u[:-lag] * 32 + u[lag:], 1024) > ALPHA


def _bits(purpose: Purpose) -> Tensor:
    zeros, steps = [0] * 100_000, list(range(100_000))
    return random_bits(keys_at(zeros, zeros, steps, purpose), 5)


@pytest.mark.parametrize("first", Purpose)
@pytest.mark.parametrize("second", Purpose)
def test_purposes_are_independent(first: Purpose, second: Purpose) -> None:
    p_value = chi_square_p_value(_bits(first) * 32 + _bits(second), 1024)
    assert (p_value > ALPHA) == (first != second)


def test_lanes_of_neighbouring_positions_are_independent() -> None:
    keys = keys_at([0] * 2, [0] * 2, [7, 8], Purpose.TARGET_GUMBEL)
    u = (gumbel_as_uniform(keys, 100_000) * 32).long().clamp(max=31)
    assert chi_square_p_value(u[0] * 32 + u[1], 1024) > ALPHA


def _seed_word(place: int) -> tuple[int, int, int]:
    return place, 0, 0


def _sample_word(place: int) -> tuple[int, int, int]:
    return 0, place, 0


def _position_word(place: int) -> tuple[int, int, int]:
    return 0, 0, place


@pytest.mark.parametrize("word", [_seed_word, _sample_word, _position_word])
def test_one_flipped_input_bit_flips_half_of_the_output(word: Callable[[int], tuple[int, int, int]]) -> None:
    for bit in range(0, 31):
        before = keys_of_places((word(place) for place in range(256)), Purpose.DRAFT)
        after = keys_of_places((word(place ^ (1 << bit)) for place in range(256)), Purpose.DRAFT)
        flipped = random_bits(before, 63) ^ random_bits(after, 63)
        num_flipped = sum(value.bit_count() for value in flipped.tolist())
        assert abs(num_flipped / (256 * 63) - 0.5) < 6 * 0.5 / math.sqrt(256 * 63)


def test_noise_follows_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)) at alpha 1e-6, then the first two moments."""
    noise = gumbel(keys_at(range(20), [0] * 20, [0] * 20, Purpose.TARGET_GUMBEL), 10_000).flatten().double()
    u = (-(-noise).exp()).exp().sort().values
    distance = (u - (torch.arange(len(u)) + 0.5) / len(u)).abs().max()
    assert distance < math.sqrt(-math.log(ALPHA / 2) / 2 / len(u))
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=0.015)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)

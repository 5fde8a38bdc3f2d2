"""The rate meter on steps whose speed is known."""

from __future__ import annotations

import math
import random

import pytest

from engine.accounting.rates import RateMeter
from engine.accounting.record import PassRecord
from tests.engine.engine_core.test_engine_core import make_core, request, run
from tests.engine.fixtures.builders import work_record

RATE = 5000.0
SLOWDOWN = 2e-4


def step(num_prefill: int, context: int = 0, *, num_decoding: int | None = None, factor: float = 1.0) -> PassRecord:
    num_decoding = min(context, 4) if num_decoding is None else num_decoding
    seconds = factor * num_prefill / RATE * (1.0 + SLOWDOWN * context)
    return work_record(num_prefill, num_decoding, context, 2 * num_decoding, seconds)


def test_nothing_is_claimed_before_it_was_measured() -> None:
    meter = RateMeter()
    meter.on_pass(work_record(1, 0, 0, 0, 0.5))  # too small for a measurement
    assert (meter.prefill_tokens_per_s, meter.decode_slowdown, meter.decode_tokens_per_s) == (0.0, 0.0, 0.0)


def test_a_chunk_takes_as_long_as_a_few_passes_without_prompts() -> None:
    meter = RateMeter()
    assert meter.chunk_tokens(2.0) == math.inf
    for _ in range(20):
        meter.on_pass(step(256, 1000))
        assert meter.chunk_tokens(2.0) == math.inf  # how long a pass without prompts takes is not known yet
    for _ in range(20):
        meter.on_pass(work_record(0, 4, 1000, 4, 0.02))
    assert meter.chunk_tokens(2.0) == pytest.approx(2.0 * 0.02 * RATE / (1.0 + SLOWDOWN * 1000))
    assert meter.chunk_tokens(4.0) == 2.0 * meter.chunk_tokens(2.0)
    for _ in range(2000):
        meter.on_pass(work_record(0, 4, 1000, 4, 1e-6))
    assert meter.chunk_tokens(2.0) == 32


def test_rate_and_slowdown_are_told_apart_under_noise() -> None:
    meter = RateMeter()
    draw = random.Random(1)
    for _ in range(300):
        meter.on_pass(step(draw.randint(64, 512), draw.choice([0, 1000, 4000]), factor=draw.uniform(0.8, 1.2)))
    assert meter.prefill_tokens_per_s == pytest.approx(RATE, rel=0.1)
    assert meter.decode_slowdown == pytest.approx(SLOWDOWN, rel=0.25)


def test_a_constant_decode_load_gives_the_rate_under_it_and_no_invented_slope() -> None:
    meter = RateMeter()
    for _ in range(50):
        meter.on_pass(step(256, 1000))
    assert meter.prefill_tokens_per_s == pytest.approx(RATE / (1 + SLOWDOWN * 1000))
    assert meter.decode_slowdown == pytest.approx(0.0, abs=1e-9)


def test_decoding_never_counts_as_a_gain() -> None:
    meter = RateMeter()
    for context in (0, 1000) * 20:
        meter.on_pass(step(256, context, factor=0.5 if context else 1.0))
    assert meter.decode_slowdown == 0.0
    assert meter.prefill_tokens_per_s > 0


def test_one_stalled_step_moves_the_rate_little_and_a_lasting_change_wholly() -> None:
    meter = RateMeter()
    for _ in range(100):
        meter.on_pass(step(256))
    meter.on_pass(step(256, factor=1000.0))
    assert meter.prefill_tokens_per_s > 0.85 * RATE
    for _ in range(150):
        meter.on_pass(step(256, factor=3.0))
    assert meter.prefill_tokens_per_s == pytest.approx(RATE / 3, rel=0.05)


def test_decode_speed_is_per_sequence_and_counts_accepted_drafts() -> None:
    meter = RateMeter()
    for _ in range(20):
        meter.on_pass(work_record(0, 4, 400, 12, 0.1))
    assert meter.decode_tokens_per_s == pytest.approx(30.0)


def test_the_engine_measures_prefill_and_decode_of_its_steps() -> None:
    core = make_core()
    core.add(request("a", [1] * 40, max_tokens=8))
    core.step()
    assert core.stats().prefill_tokens_per_s == pytest.approx(40 / core.last_times.total_s)
    assert core.stats().decode_tokens_per_s == 0.0  # the first token is the prompt's
    core.step()
    assert core.stats().decode_tokens_per_s == pytest.approx(1 / core.last_times.total_s)
    run(core)

"""Goodput is compared under equal load, and excludes prefill."""

from __future__ import annotations

import math

import pytest

from engine.accounting.goodput import GoodputMeter, GoodputStats, log_ratio, seconds_of, since
from engine.accounting.record import PassRecord
from tests.engine.fixtures.builders import work_record


def work(num_sequences: int, num_tokens: int, seconds: float, num_prefill: int = 0) -> PassRecord:
    return work_record(num_prefill, num_sequences, 100, num_tokens, seconds)


def test_steps_add_up_by_the_number_of_sequences_and_prompts_do_not_count() -> None:
    meter = GoodputMeter(times_passes=False)
    decoding = (work(1, 3, 0.1), work(1, 2, 0.1), work(5, 9, 0.4), work(7, 8, 0.4))
    for each in (*decoding, work(5, 5, 1.0, num_prefill=64), work(0, 0, 1.0)):
        meter.on_pass(each)
    assert meter.snapshot() == (GoodputStats(1, 5, 0.2), GoodputStats(4, 17, 0.8))
    assert seconds_of(meter.snapshot()) == pytest.approx(1.0)


def test_a_block_is_the_difference_of_two_snapshots_unless_the_engine_is_another() -> None:
    begin, end = (GoodputStats(1, 5, 1.0),), (GoodputStats(1, 9, 3.0), GoodputStats(4, 7, 2.0))
    assert since(begin, end) == (GoodputStats(1, 4, 2.0), GoodputStats(4, 7, 2.0))
    assert since(end, begin) is None
    assert since(begin, (GoodputStats(1, 2, 0.5),)) is None


def test_a_busier_block_is_no_faster_draft() -> None:
    """Both drafts commit 10 tokens a second for one sequence and 20 for four; one block had more of the latter."""
    calm = (GoodputStats(1, 90, 9.0), GoodputStats(4, 20, 1.0))
    busy = (GoodputStats(1, 10, 1.0), GoodputStats(4, 180, 9.0))
    assert log_ratio(busy, calm) == pytest.approx(0.0)
    faster = (GoodputStats(1, 12, 1.0), GoodputStats(4, 216, 9.0))
    assert log_ratio(faster, calm) == pytest.approx(math.log(1.2))
    assert log_ratio((GoodputStats(8, 12, 1.0),), calm) is None


def test_passes_of_a_processor_add_up_by_their_rows() -> None:
    meter = GoodputMeter(times_passes=True)
    for num_drafts, pass_s in ((4, 0.02), (4, 0.04), (2, 0.01)):
        meter.on_pass(work_record(0, 1, 100, 3, 0.1, num_drafts, pass_s))
    (begin,) = meter.snapshot()
    assert {num_rows: num for num_rows, (num, _) in begin.passes.items()} == {3: 1, 5: 2}
    meter.on_pass(work_record(0, 1, 100, 3, 0.1, 4, 0.05))
    block = since((begin,), meter.snapshot())
    assert block is not None
    assert block[0].passes == {5: (1, pytest.approx(0.05))}


def test_a_machine_that_was_slower_meanwhile_is_no_slower_draft() -> None:
    """300 passes of 5 rows took 9 s with the new draft and 3 s with the old one: they count as 6 s with both."""
    old = (GoodputStats(1, 1000, 9.0, {5: (300, 3.0)}),)
    new = (GoodputStats(1, 1000, 15.0, {5: (300, 9.0), 9: (100, 1.0)}),)
    assert log_ratio(new, old) == pytest.approx(0.0)
    assert log_ratio(old, new) == pytest.approx(0.0)
    better = (GoodputStats(1, 1200, 15.0, new[0].passes),)
    assert log_ratio(better, old) == pytest.approx(math.log(1.2))
    unknown = (GoodputStats(1, 1000, 15.0, {9: (100, 7.0)}),)
    assert log_ratio(unknown, old) == pytest.approx(math.log(9 / 15)), "no common pass measures the machine"

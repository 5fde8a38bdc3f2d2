"""A fall of acceptance is noticed, steady traffic is not, and an alarm ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from engine.accounting.counters import DraftCounters
from engine.accounting.drift import DriftDetector
from engine.accounting.record import PassRecord
from engine.config import SpeculationConfig
from protos.messages import SamplingParams, SpeculationMethod
from tests.engine.fixtures.builders import make_sequence, sequence_pass

STEADY_STEPS = 20_000
CODE, PROSE = 0.75, 0.45  # acceptance of the first draft, before and after the traffic changes
LITTLE = 0.63  # after a small change
_SOON, _LATE = 1000, 5000  # steps until a fall is noticed


def passes(
    rng: np.random.Generator, num_steps: int, num_streams: int, mean: float, concentration: float, text_steps: int
) -> Iterator[tuple[int, int]]:
    """Yield, per step, the passes with drafts and the passes whose first draft was accepted."""
    shape = mean * concentration, (1 - mean) * concentration
    chances = rng.beta(*shape, num_streams)
    left = rng.integers(1, 2 * text_steps, num_streams)
    for _ in range(num_steps):
        left -= 1
        ended = left <= 0
        chances[ended] = rng.beta(*shape, ended.sum())
        left[ended] = rng.integers(1, 2 * text_steps, ended.sum())
        yield num_streams, int((rng.random(num_streams) < chances).sum())


def run(
    seed: int, num_streams: int, concentration: float, text_steps: int, fallen_to: float = PROSE
) -> tuple[int, int | None]:
    """Return the false alarms of a steady run, and the steps until the following fall is noticed."""
    rng = np.random.default_rng(seed)
    detector = DriftDetector("model-greedy-free")
    steady = passes(rng, STEADY_STEPS, num_streams, CODE, concentration, text_steps)
    num_false = sum([detector.observe(*each) for each in steady])
    num_steps = _SOON if fallen_to == PROSE else _LATE
    fallen = passes(rng, num_steps, num_streams, fallen_to, concentration, text_steps)
    return num_false, next((step for step, each in enumerate(fallen, 1) if detector.observe(*each)), None)


def traffic(mean: float, num_steps: int, seed: int = 1) -> Iterator[tuple[int, int]]:
    return passes(np.random.default_rng(seed), num_steps, 16, mean, 20.0, 100)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_fall_is_noticed_within_200_steps_and_nothing_in_20_000_steady_ones(seed: int) -> None:
    num_false, steps = run(seed, num_streams=16, concentration=20.0, text_steps=100)
    assert num_false == 0
    assert steps is not None
    assert steps <= 200


@pytest.mark.parametrize("seed", [0, 1])
def test_a_small_fall_of_a_few_streams_is_noticed_later(seed: int) -> None:
    num_false, steps = run(seed, num_streams=4, concentration=20.0, text_steps=100, fallen_to=LITTLE)
    assert num_false == 0
    assert steps is not None
    assert steps <= 2000


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_fall_behind_a_short_history_does_not_become_what_is_usual(seed: int) -> None:
    """The steady steps have 12,000 passes; detecting the fall takes nearly as many."""
    rng, detector = np.random.default_rng(seed), DriftDetector("model-greedy-free")
    assert not any(detector.observe(*each) for each in passes(rng, 4000, 3, 0.775, 20.0, 40))
    fallen = passes(rng, 2000, 3, 0.62, 20.0, 40)
    assert any(detector.observe(*each) for each in fallen)
    assert detector.reference > 0.74


def test_an_alarm_counts_once_and_ends_when_acceptance_is_back() -> None:
    detector = DriftDetector("model-greedy-free")
    for each in traffic(0.75, 3000):
        assert not detector.observe(*each)
    assert sum([detector.observe(*each) for each in traffic(PROSE, 500, seed=2)]) == 1
    assert detector.is_alarming
    assert detector.recent < detector.reference - 0.2
    for each in traffic(0.75, 1000, seed=3):
        detector.observe(*each)
    assert not detector.is_alarming
    assert detector.stats.num_alarms == 1


def test_a_rise_is_no_alarm() -> None:
    detector = DriftDetector("model-greedy-free")
    for each in traffic(PROSE, 3000):
        detector.observe(*each)
    assert not any(detector.observe(*each) for each in traffic(0.9, 1000, seed=2))


def test_each_class_has_its_own_test_and_an_alarm_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fallen, steady = DriftDetector("model-greedy-free"), DriftDetector("model-sampled-free")
    for mean, num_steps in ((0.75, 3000), (PROSE, 300)):
        for num_passes, num_accepted in traffic(mean, num_steps):
            with caplog.at_level(logging.WARNING):
                fallen.observe(num_passes, num_accepted)
                steady.observe(num_passes, num_passes - (num_passes + 3) // 4)
    assert fallen.stats.is_alarming
    assert not steady.stats.is_alarming
    assert [record.args[0] for record in caplog.records] == ["model-greedy-free"]


@pytest.mark.parametrize(
    ("is_adaptive", "watched"), [(True, {"model-greedy-free"}), (False, {"model-greedy-free", "suffix-greedy-free"})]
)
def test_suffixes_that_are_made_where_they_pay_are_not_held_to_what_was_usual(
    is_adaptive: bool, watched: set[str]
) -> None:
    counting = DraftCounters(SpeculationConfig(adaptive=is_adaptive))
    for method in (SpeculationMethod.SUFFIX, SpeculationMethod.MODEL):
        sequence = make_sequence("r", (1,), SamplingParams(temperature=0.0), num_drafts=1, method=method)
        for _ in range(200):
            counting.on_pass(PassRecord((sequence_pass(sequence, 1, 1, 1),)))
    assert {each.name for each in counting.drift} == watched

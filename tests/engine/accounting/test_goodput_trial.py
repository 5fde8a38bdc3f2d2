"""The trial of a draft keeps its error rates, however often it is checked."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

import pytest

from engine.accounting.goodput import GoodputTrial, confidence_sequence, sign_evidence, t_evidence
from protos.served_model import CanaryOutcome

NUM_RUNS = 400
SLACK = 3 * math.sqrt(0.05 * 0.95 / NUM_RUNS)  # three standard errors of a rate of 5%

_JUMP_CHANCE = 0.05  # per block
_JUMP = 0.3  # of the logarithm of goodput
_LIKENESS = 0.7  # correlation of a block's noise with its predecessor's
_FREEDOM = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of the runs, and the mean number of pairs until the verdict."""

    kept: float
    rolled_back: float
    num_pairs: float


Noise = Callable[[random.Random, float], Iterator[float]]


def gaussian(rng: random.Random, spread: float) -> Iterator[float]:
    """Yield independent noise per block."""
    while True:
        yield rng.gauss(0.0, spread)


def heavy(rng: random.Random, spread: float) -> Iterator[float]:
    """Yield Student's noise, now and then far out."""
    scale = spread / math.sqrt(_FREEDOM / (_FREEDOM - 2))
    while True:
        squares = sum(rng.gauss(0.0, 1.0) ** 2 for _ in range(_FREEDOM))
        yield scale * rng.gauss(0.0, 1.0) / math.sqrt(squares / _FREEDOM)


def jumping(rng: random.Random, spread: float) -> Iterator[float]:
    """Yield noise about a level that jumps."""
    level = 0.0
    while True:
        if rng.random() < _JUMP_CHANCE:
            level = rng.gauss(0.0, _JUMP)
        yield level + rng.gauss(0.0, spread)


def alike(rng: random.Random, spread: float) -> Iterator[float]:
    """Yield noise that is much as it was in the block before, about a level that drifts."""
    past, level = 0.0, 0.0
    while True:
        past = _LIKENESS * past + math.sqrt(1 - _LIKENESS**2) * rng.gauss(0.0, spread)
        level += 0.01
        yield level + past


NOISES: dict[str, Noise] = {"gaussian": gaussian, "heavy tails": heavy, "jumps": jumping, "alike": alike}


def log_ratios(rng: random.Random, noise: Iterator[float], gain: float) -> Iterator[float]:
    """Yield the log ratio of each pair of blocks, one with each draft, in random order, as a canary runs them."""
    while True:
        first, second = next(noise), next(noise)
        yield math.log1p(gain) + (first - second if rng.random() < 0.5 else second - first)


def run(trial: GoodputTrial, ratios: Iterator[float]) -> tuple[CanaryOutcome, int]:
    """Return the verdict, and after how many pairs it came."""
    seen: list[float] = []
    while (verdict := trial.verdict(seen)) is CanaryOutcome.RUNNING:
        seen.append(next(ratios))
    return verdict, len(seen)


def rates(trial: GoodputTrial, noise: Noise, spread: float, gain: float, num_runs: int, seed: int = 0) -> Rates:
    """Return the rates of `num_runs` trials of a draft with this gain; `spread` is of a block's log goodput."""
    results = []
    for index in range(num_runs):
        rng = random.Random(f"{seed} {index}")
        results.append(run(trial, log_ratios(rng, noise(rng, spread), gain)))
    kept = sum(verdict is CanaryOutcome.KEPT for verdict, _ in results) / num_runs
    return Rates(kept, 1 - kept, fmean(number for _, number in results))


@pytest.mark.parametrize("noise", NOISES)
def test_a_draft_that_is_no_faster_is_seldom_kept(noise: str) -> None:
    """With the usual t-test after each pair, a quarter of them would be kept."""
    assert rates(GoodputTrial(), NOISES[noise], 0.05, 0.0, NUM_RUNS).kept <= 0.05 + SLACK


def test_a_draft_that_gains_enough_is_seldom_rolled_back() -> None:
    found = rates(GoodputTrial(), NOISES["gaussian"], 0.05, 0.25, NUM_RUNS)
    assert found.rolled_back <= 0.05 + SLACK
    assert found.num_pairs < 10
    assert rates(GoodputTrial(max_pairs=200), NOISES["gaussian"], 0.05, 0.05, 100).rolled_back <= 0.05 + SLACK


def test_a_slower_draft_is_rolled_back_early() -> None:
    found = rates(GoodputTrial(), NOISES["gaussian"], 0.05, -0.1, NUM_RUNS)
    assert found.kept == 0.0
    assert found.num_pairs < 15


def test_the_interval_is_that_of_its_martingale() -> None:
    """At its bounds the martingale is 1 / error rate, by its own formula (arXiv:2310.03722)."""
    rng = random.Random(3)
    values = [rng.gauss(0.2, 1.0) for _ in range(12)]
    interval = confidence_sequence(values, 0.1)
    number, growth = len(values), 1 + 4.0 * len(values)
    spread = math.sqrt(sum((value - interval.mean) ** 2 for value in values) / (number - 1))
    for bound in (interval.low, interval.high):
        share = (math.sqrt(number) * (interval.mean - bound) / spread) ** 2 / (number - 1)
        martingale = growth**-0.5 * ((1 + share) / (1 + share / growth)) ** (number / 2)
        assert martingale == pytest.approx(10.0)
        assert t_evidence(values, bound) == pytest.approx(10.0)


def test_two_pairs_are_no_proof_however_alike_they_are() -> None:
    assert t_evidence([0.2, 0.2], 0.0) == pytest.approx(t_evidence([0.2, 0.2 + 1e-9], 0.0)) == pytest.approx(3.0)
    assert GoodputTrial().verdict([0.2, 0.2]) is CanaryOutcome.RUNNING


@pytest.mark.parametrize(("num_above", "num_below"), [(1, 0), (8, 0), (7, 3), (10, 9)])
def test_bets_on_signs_have_the_value_of_their_integral(num_above: int, num_below: int) -> None:
    values = [1.0] * num_above + [-0.01] * num_below
    steps = [0.5 + (step + 0.5) / 20_000 for step in range(10_000)]
    integral = sum(2 * p**num_above * (1 - p) ** num_below for p in steps) / 20_000
    assert sign_evidence(values, 0.0) == pytest.approx(integral * 2 ** len(values), rel=1e-4)


def test_one_block_in_which_the_machine_did_something_else_does_not_hold_a_trial_up() -> None:
    ratios = [-2.0] + [0.2 + 0.01 * (index % 3) for index in range(12)]
    assert confidence_sequence(ratios, 0.05).low < 0
    assert GoodputTrial().verdict(ratios) is CanaryOutcome.KEPT


def test_a_verdict_has_its_reason_and_the_budget_ends_the_trial() -> None:
    trial = GoodputTrial(max_pairs=6)
    assert trial.verdict([]) is trial.verdict([0.5]) is CanaryOutcome.RUNNING
    assert trial.reason([0.5]) == ""
    faster = [0.2, 0.21, 0.19, 0.2, 0.2]
    assert (trial.verdict(faster), "faster" in trial.reason(faster)) == (CanaryOutcome.KEPT, True)
    slower = [-value for value in faster]
    assert (trial.verdict(slower), "less than 5.0%" in trial.reason(slower)) == (CanaryOutcome.ROLLED_BACK, True)
    unclear = [1.0, -1.0, 0.9, -1.1, 1.1, -0.9]
    assert trial.verdict(unclear[:-1]) is CanaryOutcome.RUNNING
    assert (trial.verdict(unclear), "no gain was shown in 6" in trial.reason(unclear)) == (
        CanaryOutcome.ROLLED_BACK,
        True,
    )

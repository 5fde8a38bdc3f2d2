"""Evidence keeps its level under the claim, and reaches its power under the planned fault."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from cluster.cli.audit.evidence import FAULT_RATE, DrawEvidence, HitEvidence

CLAIM = np.asarray([0.6, 0.25, 0.1, 0.05])
FAULT = np.asarray([0.63, 0.23125, 0.0925, 0.04625])  # the vLLM fault: 60% served at 63%
THRESHOLD = math.log(1e5)


def evidence_of(probs: np.ndarray, number: int, noise: np.random.Generator) -> DrawEvidence:
    evidence = DrawEvidence()
    evidence.add(CLAIM, [int(count) for count in noise.multinomial(number, probs)])
    return evidence


def test_the_mean_of_the_evidence_is_one_under_the_claim():
    """Exact, by enumeration of all outcomes of two draws."""
    total = 0.0
    for first, second in itertools.product(range(4), repeat=2):
        evidence = DrawEvidence()
        for cell in (first, second):
            evidence.add(CLAIM, [int(cell == rank) for rank in range(4)], sticky=1)
        total += CLAIM[first] * CLAIM[second] * math.exp(evidence.log_evidence)
    assert total == pytest.approx(1.0)


def test_the_stated_number_of_draws_finds_60_percent_served_at_63():
    noise = np.random.default_rng(5)
    number = evidence_of(CLAIM, 1000, noise).num_needed(THRESHOLD)
    assert 10_000 < number < 20_000
    assert evidence_of(CLAIM, number, noise).is_enough(THRESHOLD)
    assert not evidence_of(CLAIM, number // 2, noise).is_enough(THRESHOLD)
    found = sum(evidence_of(FAULT, number, noise).log_evidence >= THRESHOLD for _ in range(300))
    assert found >= 290
    assert not any(evidence_of(CLAIM, number, noise).log_evidence >= THRESHOLD for _ in range(300))


def test_an_ignored_parameter_is_planned_for_by_its_own_effect():
    evidence = DrawEvidence(1)
    evidence.add(CLAIM, [6, 3, 1, 0], [np.asarray([0.1, 0.2, 0.3, 0.4])])
    assert evidence.num_needed(THRESHOLD) < 60


def test_a_repeated_token_is_evidence():
    evidence = DrawEvidence()
    for _ in range(40):
        evidence.add(CLAIM, [0, 0, 1, 0], sticky=2)
    assert evidence.log_evidence > THRESHOLD


def test_the_stated_number_of_trials_finds_one_fault_in_ten():
    noise, number = random.Random(3), HitEvidence().num_needed(THRESHOLD)
    assert number < 100

    def is_found(rate: float) -> bool:
        evidence = HitEvidence()
        for _ in range(number):
            evidence.add(noise.random() < rate)
        return evidence.log_evidence >= THRESHOLD

    assert sum(is_found(FAULT_RATE) for _ in range(500)) >= 487
    assert not any(is_found(1e-4) for _ in range(500))

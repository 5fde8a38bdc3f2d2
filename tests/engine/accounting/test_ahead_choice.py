"""Drafting ahead of verdicts or not: the faster way is found at each size of batch, and the search costs little."""

from __future__ import annotations

import random

import pytest

from engine.accounting.draft_planning import AheadChoice, DraftPlanning
from engine.accounting.record import PassRecord
from engine.config import SpeculationConfig
from engine.sequence.sequence import SequenceStatus
from tests.engine.fixtures.builders import pass_record, sequence_pass
from tests.engine.fixtures.pairs.simulated_pair import new_sequence

SEQUENCE = new_sequence(0)


def step(num_accepted: list[int], seconds: float) -> PassRecord:
    return pass_record([sequence_pass(SEQUENCE, 4, 4, each) for each in num_accepted], 0.0, seconds)


def run(choice: AheadChoice, num_steps: int, ahead_s: float, after_s: float, size: int = 1) -> tuple[float, float]:
    """Run noisy steps and return the share made ahead, and the mean seconds over the better way's."""
    dice, num_ahead, total_s = random.Random(0), 0, 0.0
    for _ in range(num_steps):
        is_ahead = choice.is_ahead
        num_ahead += is_ahead
        seconds = ahead_s if is_ahead else after_s
        total_s += seconds
        accepted = [dice.choice((0, 1, 2, 4)) for _ in range(size)]
        choice.observe(step(accepted, seconds * dice.lognormvariate(0.0, 0.1)))
    return num_ahead / num_steps, total_s / num_steps / min(ahead_s, after_s)


@pytest.mark.parametrize(("ahead_s", "after_s"), [(0.010, 0.015), (0.015, 0.010)])
def test_the_faster_way_is_taken_and_the_other_one_tried_now_and_then(ahead_s: float, after_s: float) -> None:
    choice = AheadChoice()
    run(choice, 200, ahead_s, after_s)
    share, cost = run(choice, 4000, ahead_s, after_s)
    rare = min(share, 1 - share)
    assert (share > 0.5) is (ahead_s < after_s)
    assert 0.02 < rare < 0.08
    assert cost < 1.04


def test_a_way_that_becomes_faster_is_found() -> None:
    choice = AheadChoice()
    run(choice, 1000, 0.015, 0.010)
    assert run(choice, 2000, 0.010, 0.015)[0] > 0.5


def test_each_size_of_batch_has_its_way() -> None:
    choice = AheadChoice()
    for _ in range(40):
        run(choice, 64, 0.010, 0.015, size=1)
        run(choice, 64, 0.040, 0.020, size=16)
    assert run(choice, 400, 0.010, 0.015, size=1)[0] > 0.9
    assert run(choice, 400, 0.040, 0.020, size=16)[0] < 0.1


def test_a_batch_with_a_sequence_less_while_a_prompt_joins_has_one_way() -> None:
    choice, shares = AheadChoice(), []
    for _ in range(100):
        shares.append(run(choice, 10, 0.040, 0.020, size=8)[0])
        run(choice, 3, 0.040, 0.020, size=7)
    assert sum(shares[50:]) / 50 < 0.2


def test_ways_that_differ_by_less_than_noise_are_not_changed_for_ever() -> None:
    choice, dice, changes, before = AheadChoice(), random.Random(1), 0, True
    for _ in range(8000):
        choice.observe(step([dice.choice((0, 1, 2, 4))], 0.010 * dice.lognormvariate(0.0, 0.1)))
        changes += choice.is_ahead is not before
        before = choice.is_ahead
    assert changes < 0.08 * 8000


def test_sequences_are_told_after_each_pass_and_steps_with_prompts_teach_nothing() -> None:
    sequence = new_sequence(0)
    sequence.status = SequenceStatus.RUNNING

    def share(planning: DraftPlanning, num_prompt_rows: int) -> float:
        seen = []
        for _ in range(400):
            seen.append(sequence.drafts_ahead)
            draft_s = 0.020 if sequence.drafts_ahead else 0.002
            planning.on_pass(pass_record([sequence_pass(sequence, 4, 4, 2)], draft_s, 0.010, num_prompt_rows))
        return sum(seen[200:]) / 200

    speculation = SpeculationConfig(4, adaptive=True, can_draft_ahead=True)
    assert 0.0 < share(DraftPlanning(speculation), 0) < 0.2
    assert share(DraftPlanning(speculation), 1) == 1.0
    assert share(DraftPlanning(SpeculationConfig(4, adaptive=True)), 0) == 0.0

"""The outcomes of a pass that are drafted for."""

import pytest

from engine.proposer.draft_model.ahead_drafter import fan_out


@pytest.mark.parametrize("num_drafts", range(0, 9))
@pytest.mark.parametrize("num_per_position", range(1, 6))
def test_there_are_as_many_candidates_as_asked_for_and_none_is_twice(num_drafts: int, num_per_position: int):
    candidates = fan_out(num_drafts, num_per_position)
    assert len(candidates) == len(set(candidates)) == num_per_position * (num_drafts + 1)
    assert all(0 <= num_accepted <= num_drafts for num_accepted, _ in candidates)


def test_a_pass_without_drafts_has_one_position():
    assert fan_out(0, 3) == ((0, 0), (0, 1), (0, 2))


def test_that_all_drafts_stand_and_the_bonus_is_the_drafts_own_is_likeliest():
    assert fan_out(5, 3)[0] == (5, 0)


def test_ranks_of_a_position_are_complete_and_in_order():
    for k in range(4):
        ranks = [rank for num_accepted, rank in fan_out(3, 3) if num_accepted == k]
        assert ranks == list(range(len(ranks)))


def test_positions_fan_out_the_less_the_more_drafts_must_stand():
    counts = [sum(num_accepted == k for num_accepted, _ in fan_out(3, 3)) for k in range(4)]
    assert counts == [4, 3, 2, 3]  # the last position's own choice is one of its three

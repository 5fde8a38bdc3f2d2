"""Curves learned from noisy passes."""

from __future__ import annotations

import numpy as np
import pytest

from engine.accounting.cost_model import DENSE, CostModel, ExpertReads, PassCurve
from engine.accounting.draft_cost import DraftCost


def true_s(num_rows: int) -> float:
    return max(0.010, 0.0002 * num_rows)


def learned(sizes: list[int], num_passes: int, noise: float = 0.1, slow_from: int = 10**9) -> PassCurve:
    cost, rng = PassCurve(), np.random.default_rng(0)
    for step in range(num_passes):
        size = sizes[step % len(sizes)]
        cost.observe(size, true_s(size) * rng.lognormal(0.0, noise) * (1.5 if step >= slow_from else 1.0))
    return cost


def seconds(cost: PassCurve, size: int) -> float:
    return cost.at(size)


def test_the_curve_comes_out_of_the_noise() -> None:
    cost = learned([4, 20, 64, 100, 200], 1000)
    level = seconds(cost, 4) / true_s(4)
    for size in (4, 20, 64, 100, 200):
        assert seconds(cost, size) == pytest.approx(level * true_s(size), rel=0.08)


def test_a_slower_machine_moves_the_sizes_that_it_is_not_seen_at() -> None:
    cost = learned([8, 128], 200, noise=0.0)
    for _ in range(30):
        cost.observe(128, 1.5 * true_s(128))
    assert seconds(cost, 8) == pytest.approx(1.5 * true_s(8), rel=0.1)


def test_one_slow_pass_moves_the_curve_little() -> None:
    cost = learned([8, 128], 200, noise=0.0)
    ratio = seconds(cost, 128) / seconds(cost, 8)
    cost.observe(128, 100.0)
    assert seconds(cost, 128) / seconds(cost, 8) < 1.2 * ratio


def test_hiccups_move_neither_the_curve_nor_what_is_expected_of_a_draft() -> None:
    """One pass in eight is two to six times slower, as on a shared machine."""
    rows, draft, rng = PassCurve(), DraftCost(), np.random.default_rng(3)
    for step in range(400):
        size = (4, 16, 32, 64, 128)[step % 5]
        hiccups = np.where(rng.random(2) < 0.125, rng.uniform(2.0, 6.0, 2), 1.0) * rng.lognormal(0.0, 0.05, 2)
        rows.observe(size, true_s(size) * hiccups[0])
        draft.observe(4, 4, 0.004 * hiccups[1])
    for size in (16, 32, 64, 128):
        assert seconds(rows, size) / seconds(rows, 4) == pytest.approx(true_s(size) / true_s(4), rel=0.12)
    assert draft.seconds(4, 4) == pytest.approx(0.004, rel=0.05)


def test_a_size_whose_only_pass_was_a_hiccup_is_tried_again() -> None:
    cost = learned([2, 4], 100, noise=0.0)
    cost.observe(16, 6 * true_s(16))
    assert seconds(cost, 16) > 1.3 * true_s(16)
    assert cost.seconds(np.array([16]), 1.0)[0] <= 1.01 * true_s(4)
    for _ in range(3):
        cost.observe(16, true_s(16))
    assert seconds(cost, 16) == pytest.approx(true_s(16), rel=0.1)


def test_a_size_never_seen_costs_what_the_next_smaller_does_until_it_is_seen() -> None:
    cost = learned([4, 256], 50, noise=0.0)
    assert seconds(cost, 64) == pytest.approx(true_s(4), rel=0.01)
    cost.observe(64, true_s(64))
    assert seconds(cost, 64) == pytest.approx(true_s(64), rel=0.05)
    assert cost.max_rows == 512


def test_optimism_lowers_sizes_most_that_were_seldom_seen() -> None:
    cost = learned([4] * 50 + [64], 102)
    often, seldom = (float(cost.seconds(np.array([size]), 1.0)[0]) / seconds(cost, size) for size in (4, 64))
    assert seldom < often < 1.0


def test_no_cost_falls_with_size() -> None:
    cost = learned([4, 6, 8, 12, 16, 24, 32], 60, noise=0.5)
    assert (np.diff(cost.seconds(np.arange(1, 100))) >= 0).all()


def test_draft_time_is_split_into_steps_and_tokens() -> None:
    cost, rng = DraftCost(), np.random.default_rng(0)
    for _ in range(200):
        steps, streams = int(rng.integers(1, 9)), int(rng.integers(1, 33))
        cost.observe(steps, steps * streams, (0.001 * steps + 0.0001 * steps * streams) * rng.lognormal(0.0, 0.05))
    assert cost.prices.step_s == pytest.approx(0.001, rel=0.15)
    assert cost.prices.token_s == pytest.approx(0.0001, rel=0.15)


@pytest.mark.parametrize("request_s", [0.0, 0.0005, 0.005])
def test_drafts_of_several_lengths_show_the_price_of_a_request(request_s: float) -> None:
    cost, rng = DraftCost(), np.random.default_rng(0)
    for _ in range(200):
        steps = int(rng.integers(1, 5))
        cost.observe(steps, 2 * steps, (request_s + 0.001 * steps) * rng.lognormal(0.0, 0.05))
    assert cost.seconds(1, 2) == pytest.approx(request_s + 0.001, rel=0.1)
    assert cost.seconds(4, 8) == pytest.approx(request_s + 0.004, rel=0.1)


def test_one_stream_teaches_the_price_of_a_step() -> None:
    cost = DraftCost()
    for _ in range(10):
        cost.observe(4, 4, 0.004)
    assert cost.seconds(4, 4) == pytest.approx(0.004, rel=0.01)
    assert cost.seconds(4, 40) < 0.006


def test_rows_of_a_mixture_are_expected_to_bring_experts_until_they_are_measured() -> None:
    """Of 32 experts a row reads 4: five rows read 15.6 of them."""
    mixture = ExpertReads(share=0.8, chance=1 / 8)
    assert mixture.growth(5) == pytest.approx(1 + 0.8 * (32 * (1 - (7 / 8) ** 5) / 4 - 1))
    models = {experts: CostModel(experts) for experts in (DENSE, mixture)}
    for costs in models.values():
        costs.observe(0, 1, 0.010)
        costs.observe(0, 2, 0.010)
    unseen = {experts: costs.row_seconds(2, 1, is_optimistic=False).alone for experts, costs in models.items()}
    assert unseen[DENSE][1] == pytest.approx(0.010)
    assert unseen[mixture][1] > 0.011
    for costs in models.values():
        costs.observe(0, 3, 0.010)
        assert costs.row_seconds(2, 1, is_optimistic=False).alone[1] == pytest.approx(0.010)


def test_all_rows_of_a_mixture_read_each_expert_once() -> None:
    assert ExpertReads(share=1.0, chance=1 / 8).growth(10_000) == pytest.approx(8)
    assert DENSE.growth(10_000) == 1


def test_a_prompt_that_the_curve_does_not_cover_leaves_room_for_drafts() -> None:
    """The first pass of all has a prompt, and is not learned from."""
    costs = CostModel()
    for num_prompt_rows, num_rows in ((44, 4), (0, 16)):
        costs.count(num_prompt_rows, 4)
        costs.observe(num_prompt_rows, num_rows, 0.010)
    assert costs.room(4) == 28
    assert costs.row_seconds(4, 4, is_optimistic=False).prompt_share == 0.0

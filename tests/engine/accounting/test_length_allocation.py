"""The allocation against all possible allocations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from engine.accounting.cost_model import Floats, RowSeconds
from engine.accounting.draft_cost import DraftPrices
from engine.accounting.length_allocation import allocate


@pytest.mark.parametrize("seed", range(30))
def test_of_lengths_that_are_nearly_the_best_the_shortest_pass_is_taken(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_sequences, num_positions = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    acceptance = np.cumprod(rng.uniform(0.2, 1.0, (num_sequences, num_positions)), axis=1)
    max_drafts = int(rng.integers(1, num_sequences * num_positions + 1))
    row_seconds = 1.0 + np.cumsum(rng.exponential(rng.choice([0.05, 0.4]), max_drafts + 1))
    request_s, step_s, token_s = rng.exponential(0.1, 3)

    def seconds(lengths: tuple[int, ...]) -> float:
        own_s = request_s + step_s * max(lengths) + token_s * sum(lengths) if any(lengths) else 0.0
        return float(row_seconds[sum(lengths)] + own_s)

    def goodput(lengths: tuple[int, ...]) -> float:
        tokens = num_sequences + sum(acceptance[r, :length].sum() for r, length in enumerate(lengths))
        return tokens / seconds(lengths)

    every = [each for each in product(range(num_positions + 1), repeat=num_sequences) if sum(each) <= max_drafts]
    best = max(map(goodput, every))
    plain = num_sequences / row_seconds[0]
    near = [each for each in every if goodput(each) >= max(0.99 * best, plain) and (any(each) or best == plain)]
    found = allocate(acceptance.tolist(), _alone(row_seconds), DraftPrices(request_s, step_s, token_s))
    lengths = tuple(found.lengths)
    assert lengths in near
    assert seconds(lengths) == pytest.approx(min(map(seconds, near)))
    assert found.tokens_per_s == pytest.approx(goodput(lengths))
    assert found.plain_tokens_per_s == pytest.approx(plain)
    assert found.seconds == pytest.approx(seconds(lengths))
    assert found.least_tokens == pytest.approx(
        1.0 + min(acceptance[index, :length].sum() for index, length in enumerate(lengths))
    )


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_no_pass_is_made_longer_than_the_limit(num_sequences: int) -> None:
    acceptance = np.full((num_sequences, 4), 0.9).cumprod(axis=1)
    row_seconds = 1.0 + 0.1 * np.arange(4 * num_sequences + 1)
    free = allocate(acceptance.tolist(), _alone(row_seconds), DraftPrices(0.0, 0.05, 0.0))
    found = allocate(acceptance.tolist(), _alone(row_seconds), DraftPrices(0.0, 0.05, 0.0), max_seconds=1.35)
    num_drafts, longest = sum(found.lengths), max(found.lengths)
    assert 0 < num_drafts < sum(free.lengths)
    assert row_seconds[num_drafts] + 0.05 * longest <= 1.35 < row_seconds[num_drafts + 1] + 0.05 * (longest + 1)
    assert (
        allocate(acceptance.tolist(), _alone(row_seconds), DraftPrices(0.0, 0.05, 0.0), max_seconds=0.9).lengths
        == [0] * num_sequences
    )


def test_positions_of_zero_acceptance_get_no_draft() -> None:
    acceptance = [[0.9, 0.8], [0.0, 0.0], [0.9, 0.0]]
    assert allocate(acceptance, _alone(np.ones(7)), DraftPrices(0.0, 0.0, 0.0)).lengths == [2, 0, 1]


def test_equal_chances_fill_from_the_front() -> None:
    assert allocate([[1.0] * 3] * 2, _alone(np.array([1.0, 1.0, 1.0, 9.0])), DraftPrices(0.0, 0.0, 0.0)).lengths == [
        1,
        1,
    ]


def test_a_pass_that_no_draft_improves_has_none() -> None:
    found = allocate([[0.1] * 3] * 2, _alone(np.arange(2.0, 9.0)), DraftPrices(0.0, 0.0, 0.0))
    assert found.lengths == [0, 0]
    assert found.tokens_per_s == found.plain_tokens_per_s == 1.0


def test_prompts_that_come_anyway_do_not_make_plain_passes_look_cheap() -> None:
    """A prompt hides 9 of the 10 seconds of a pass of two sequences, so drafts of 3 s gain nothing next to it."""
    acceptance, alone = np.full((2, 2), 0.9).cumprod(axis=1), np.full(5, 10.0)
    hidden = np.full(5, 9.0)
    always = allocate(
        acceptance.tolist(), RowSeconds(alone, hidden, prompt_share=1.0, num_tokens=2.0), DraftPrices(0.0, 1.5, 0.0)
    )
    assert always.lengths == [0, 0]
    # Passes with drafts give five tokens, and every second one has a prompt: of plain passes every fifth one has.
    found = allocate(
        acceptance.tolist(), RowSeconds(alone, hidden, prompt_share=0.5, num_tokens=5.0), DraftPrices(0.0, 1.5, 0.0)
    )
    assert found.lengths == [2, 2]
    assert found.plain_tokens_per_s == pytest.approx(2 / (10 - 0.2 * 9))


def test_a_prompt_next_to_a_single_sequence_hides_its_rows_too() -> None:
    chances, alone, hidden = [[0.9, 0.81]], np.full(3, 10.0), np.full(3, 9.0)
    found = [
        allocate(chances, RowSeconds(alone, hidden, prompt_share=share), DraftPrices(0.0, 1.5, 0.0)).lengths
        for share in (0.0, 1.0)
    ]
    assert found == [[2], [0]]


def _alone(seconds: Floats) -> RowSeconds:
    """Return the seconds of passes without prompts."""
    return RowSeconds(seconds, np.zeros(len(seconds)))

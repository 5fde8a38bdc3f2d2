"""Estimates of acceptance, by request, class and position."""

from __future__ import annotations

import numpy as np
import pytest

from engine.accounting.acceptance import AcceptanceTable


def observe(table: AcceptanceTable, name: str, proposed: int, accepted: int, times: int = 1, kind: str = "c") -> None:
    for _ in range(times):
        table.observe([name], [kind], [proposed], [accepted])


def acceptance(table: AcceptanceTable, name: str, kind: str = "c") -> list[float]:
    return table.of([name], [kind], [0])[0]


def test_each_position_has_its_own_rate_given_those_before() -> None:
    table = AcceptanceTable(3)
    rng = np.random.default_rng(0)
    for _ in range(400):
        stands = rng.random(3) < (0.9, 0.5, 0.7)
        observe(table, "a", 3, int(np.cumprod(stands).sum()))
    assert acceptance(table, "a") == pytest.approx([0.9, 0.45, 0.315], abs=0.12)


def test_a_short_draft_says_nothing_of_the_positions_it_did_not_have() -> None:
    table = AcceptanceTable(3)
    observe(table, "a", 3, 3, times=20)
    before = acceptance(table, "a")
    observe(table, "a", 1, 1, times=50)
    after = acceptance(table, "a")
    assert after[1] / after[0] == pytest.approx(before[1] / before[0], rel=0.01)


def test_drafts_behind_the_first_that_fell_count_nowhere() -> None:
    one, other = AcceptanceTable(4), AcceptanceTable(4)
    observe(one, "a", 4, 1, times=5)
    observe(other, "a", 2, 1, times=5)
    assert acceptance(one, "a") == acceptance(other, "a")


def test_a_new_request_is_taken_for_one_of_its_class() -> None:
    table = AcceptanceTable(2)
    for index in range(60):
        observe(table, f"bad {index}", 2, 0, kind="bad")
        observe(table, f"good {index}", 2, 2, kind="good")
    assert acceptance(table, "new", "bad")[0] < 0.1
    assert acceptance(table, "new", "good")[0] > 0.9


def test_a_request_is_soon_known_for_itself() -> None:
    table = AcceptanceTable(2)
    observe(table, "good", 2, 2, times=100)
    observe(table, "bad", 2, 0, times=20)
    assert acceptance(table, "bad")[0] < 0.35


def test_a_request_that_left_is_forgotten_and_its_class_is_not() -> None:
    table = AcceptanceTable(2)
    observe(table, "a", 2, 0, times=100)
    of_request = acceptance(table, "a")
    table.keep_only([])
    assert of_request[0] < acceptance(table, "a")[0] < 0.2


def test_a_chain_longer_than_the_largest_tree_counts_up_to_it() -> None:
    """A proposer may answer with a chain where a tree was requested."""
    table = AcceptanceTable(3, has_trees=True)
    table.observe_trees(["a"], ["c"], [5], [range(4)])
    assert len(acceptance(table, "a")) == 3
    assert acceptance(table, "a")[2] > 0.7

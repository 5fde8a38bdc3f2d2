"""Spans that share blocks are read together, and each row sees exactly its own sequence."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention.read_plan import Extent, SharedExtents, hidden_keys, share
from engine.batch.span import Span

P = 4


def extents(*tables: list[int], num_rows: int = 2, start: int | None = None) -> list[Extent]:
    """Spans that end with their last block's last slot."""
    spans = [Span([0] * num_rows, len(table) * P - num_rows if start is None else start, table, 0) for table in tables]
    return [Extent(span, index * num_rows, 0, span.block_table) for index, span in enumerate(spans)]


def test_branches_of_one_sequence_are_read_together():
    (group,) = share(extents([1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 3, 9]), P)
    assert list(group.first_keys.items()) == [(1, 0), (2, P), (3, 2 * P), (7, 3 * P), (8, 3 * P), (9, 3 * P)]


def test_sequences_that_share_little_or_nothing_are_not():
    assert share(extents([1, 2, 3], [4, 5, 6]), P) == []
    assert share(extents([1, 2, 3, 4], [1, 5, 6, 7]), P) == []
    assert share(extents([1, 2, 3, 4]), P) == []


def test_spans_of_different_lengths_are_not():
    assert share([*extents([1, 2, 3, 7]), *extents([1, 2, 3, 8], num_rows=3)], P) == []


def test_a_group_stays_small():
    groups = share(extents(*([1, 2, 3, 10 + index] for index in range(40))), P)
    assert [len(group.extents) for group in groups] == [16, 16, 8]


@pytest.mark.parametrize("window", [None, 3, 7])
def test_a_row_sees_its_own_blocks_up_to_its_position(window: int | None):
    dice = random.Random(0)
    for _ in range(20):
        groups = [random_group(dice, first_block=100 * index) for index in range(3)]
        is_hidden = hidden_keys(groups, P, window, torch.device("cpu"))
        for group, hidden in zip(groups, is_hidden, strict=True):
            check(group, hidden, window)


def random_group(dice: random.Random, first_block: int) -> SharedExtents:
    """Up to four branches that diverge anywhere after a prefix of three blocks; each computes two rows."""
    tables = []
    for branch in range(dice.randint(1, 4)):
        num_shared = dice.randint(2, 3)
        own = [first_block + 10 + 3 * branch + index for index in range(dice.randint(1, 2))]
        tables.append([first_block + index for index in range(num_shared)] + own)
    members = [
        Extent(Span([0, 0], dice.randrange(len(table) * P - P, len(table) * P - 1), table, 0), 0, 0, table)
        for table in tables
    ]
    return SharedExtents(
        tuple(members), {block_id: index * P for table in tables for index, block_id in enumerate(table)}
    )


def check(group: SharedExtents, hidden: torch.Tensor, window: int | None) -> None:
    block_ids = list(group.first_keys)
    for extent, rows in zip(group.extents, hidden, strict=False):
        for step, row in enumerate(rows.tolist()):
            position = extent.span.start + step
            first = 0 if window is None else max(0, position - window + 1)
            seen = [
                (block_ids[key // P], key % P)
                for key, is_hidden in enumerate(row)
                if not is_hidden and key // P < len(block_ids)
            ]
            expected = [(extent.span.block_table[i // P], i % P) for i in range(first, position + 1)]
            assert sorted(seen) == sorted(expected)
            assert all(row[len(block_ids) * P :]), "padding is seen"

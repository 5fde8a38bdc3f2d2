"""Ancestor masks in 64 bits against the masks that the processor's path adds."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.attention.ancestor_mask import ancestor_masks, ancestors
from engine.batch.draft import depths
from engine.batch.span import Span
from engine.config import MAX_TREE_NODES


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(1, MAX_TREE_NODES))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(size))


def as_rows(masks: list[int], num_nodes: int) -> list[list[bool]]:
    return [[bool(mask >> node & 1) for node in range(num_nodes)] for mask in masks]


@given(parents=trees(), window=st.one_of(st.none(), st.integers(1, 70)))
@example(parents=tuple(range(-1, MAX_TREE_NODES - 1)), window=1)
@example(parents=(-1,) * MAX_TREE_NODES, window=None)
def test_bits_are_the_ancestors_within_the_window(parents: tuple[int, ...], window: int | None) -> None:
    masks = ancestor_masks(Span([0] * len(parents), 10, [], 0, parents), window)
    by_depth = torch.tensor(depths(parents))
    seen = ancestors(parents) & (by_depth > by_depth[:, None] - (window or 1000))
    assert as_rows(masks, len(parents)) == seen.tolist()
    assert torch.tensor(masks, dtype=torch.int64).tolist() == masks


def test_rows_before_the_tree_have_no_bits() -> None:
    assert ancestor_masks(Span([0] * 5, 10, [], 0, (-1, 0, 0)), None) == [0, 0, 1, 3, 5]


def test_a_tree_may_begin_before_the_span() -> None:
    assert ancestor_masks(Span([0] * 2, 12, [], 0, (-1, -1, 0, 1)), None) == [5, 10]

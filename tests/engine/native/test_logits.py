"""The kernels convert logits and choose the highest score as torch does."""

from __future__ import annotations

import pytest
import torch

from engine.native.library import highest, widened

SHAPES = pytest.mark.parametrize("shape", [(1, 1), (1, 15), (3, 49_152), (2, 40_001), (17, 96)])


@SHAPES
def test_the_highest_score_is_the_first_of_equals(shape: tuple[int, int]) -> None:
    scores = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).float()
    for row in scores:
        places = (row == row.max()).nonzero()
        assert highest(row[None]).tolist() == places[0].tolist()
    spread = torch.randn(shape)
    assert torch.equal(highest(spread), spread.argmax(dim=1))
    assert torch.equal(highest(spread.t().contiguous().t()), spread.argmax(dim=1))


def test_impossible_tokens_and_scores_that_are_no_numbers_are_chosen_as_torch_does() -> None:
    scores = torch.full((4, 100), float("-inf"))
    scores[1, 70], scores[2, 99], scores[3, 5], scores[3, 6] = -1e30, 0.0, -0.0, 0.0
    assert highest(scores).tolist() == [0, 70, 99, 5]
    scores[1, 33] = float("nan")
    assert torch.equal(highest(scores), scores.argmax(dim=1))


@SHAPES
def test_widened_logits_are_the_same_numbers(shape: tuple[int, int]) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.randn(shape).to(dtype)
        assert torch.equal(widened(logits), logits.float())
    strange = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-40]]).bfloat16()
    assert torch.equal(widened(strange).view(torch.int32), strange.float().view(torch.int32))

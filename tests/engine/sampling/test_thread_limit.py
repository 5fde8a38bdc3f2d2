"""Small operations on scores use one thread, large ones use all, and the noise has the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.sampling.noise import gumbel, limited_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_for(*shape: int) -> int:
    with limited_threads(torch.empty(shape)):
        return torch.get_num_threads()


def test_threads_grow_with_the_scores_up_to_those_there_are() -> None:
    assert [threads_for(1, 49_152), threads_for(6, 49_152), threads_for(100, 49_152)] == [1, 2, 3]
    assert torch.get_num_threads() == 3


def test_threads_come_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="no"), limited_threads(torch.empty(1, 8)):
        raise ValueError("no")
    assert torch.get_num_threads() == 3


def test_noise_has_the_same_bits_on_any_number_of_threads() -> None:
    keys = torch.arange(5) * 1_234_567
    expected = gumbel(keys, 49_152)
    with limited_threads(torch.empty(1, 8)):
        assert torch.equal(gumbel(keys, 49_152), expected)

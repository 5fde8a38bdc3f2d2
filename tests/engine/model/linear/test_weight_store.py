"""Parts of a weight are converted on all threads, and come in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.model.linear.weight_store import converted

WEIGHT = torch.arange(2048.0)[:, None].expand(2048, 1024)  # eight parts


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_parts_are_computed_together_and_come_in_order() -> None:
    together = threading.Barrier(2, timeout=30)

    def convert(part: Tensor) -> float:
        together.wait()
        return float(part[0, 0])

    assert list(converted(convert, WEIGHT)) == [256.0 * index for index in range(8)]


def test_a_part_is_computed_by_one_thread_in_the_callers_mode() -> None:
    with torch.inference_mode():
        found = list(converted(lambda part: (torch.get_num_threads(), torch.is_inference_mode_enabled()), WEIGHT))
    assert set(found) == {(1, True)}


def test_an_error_of_a_part_reaches_the_caller() -> None:
    def convert(part: Tensor) -> None:
        raise ValueError(f"the part from {float(part[0, 0])} on")

    with pytest.raises(ValueError, match=r"the part from 0\.0 on"):
        list(converted(convert, WEIGHT))


def test_few_parts_are_ahead_of_the_caller() -> None:
    begun: list[float] = []
    parts = converted(lambda part: begun.append(float(part[0, 0])), WEIGHT)
    next(parts)
    assert len(begun) <= 3
    parts.close()  # type: ignore[attr-defined]

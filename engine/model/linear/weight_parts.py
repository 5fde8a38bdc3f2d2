"""Parts of a weight, converted one by one: no whole copy of it is made, and a part stays in a core's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

OUTPUTS = 32  # of a pair of tiles
_PART_ELEMENTS = 1 << 18


def parts_of(weight: Tensor) -> tuple[Tensor, ...]:
    """Split a weight [out, in] into parts of whole pairs of tiles; the last part may have fewer outputs."""
    parts: tuple[Tensor, ...] = weight.split(max(1, _PART_ELEMENTS // (weight.shape[1] * OUTPUTS)) * OUTPUTS)
    return parts


def converted(convert: Callable[[Tensor], T], weight: Tensor) -> Iterator[T]:
    """Yield `convert` of each part of `weight` in order.

    One thread computes: several would spend more on waiting for each other than a part takes, above all where other
    processes want the cores.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from map(convert, parts_of(weight))
    finally:
        torch.set_num_threads(num_threads)

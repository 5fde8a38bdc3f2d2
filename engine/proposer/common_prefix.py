"""The common prefix of two lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq


def num_equal(left: Seq[int], right: Seq[int]) -> int:
    """Return the length of the common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))

"""Acceptance by draft method and class of requests. Both sets are small and fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.sequence.request_tokens import RequestTokens


@dataclass(frozen=True, slots=True)
class ClassKey:
    """A class of passes with comparable acceptance: the draft method, and how the requests are sampled."""

    method: str
    name: str  # greedy or sampled, free or structured


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Sums since the start: `num_drafted[i]` passes had a draft at position i, and `num_accepted[i]` accepted it."""

    method: str
    name: str
    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]


def class_key(method: str, sequence: RequestTokens) -> ClassKey:
    """Return the class of a sequence's pass."""
    return ClassKey(method, class_name(is_greedy=sequence.is_greedy, is_structured=sequence.matcher is not None))


def class_name(*, is_greedy: bool, is_structured: bool) -> str:
    """Return the name of a class of requests."""
    return f"{'greedy' if is_greedy else 'sampled'}-{'structured' if is_structured else 'free'}"


class ClassCounters:
    """Counts `ClassStats`."""

    def __init__(self) -> None:
        self._counts: dict[ClassKey, tuple[list[int], list[int]]] = {}

    def record(self, key: ClassKey, depth: int, num_accepted: int, num_passes: int = 1) -> None:
        """Count passes with the same outcome and drafts of length `depth`."""
        drafted, accepted = self._counts.setdefault(key, ([], []))
        missing = [0] * (depth - len(drafted))
        drafted += missing
        accepted += missing
        for position in range(depth):
            drafted[position] += num_passes
        for position in range(num_accepted):
            accepted[position] += num_passes

    def snapshot(self) -> tuple[ClassStats, ...]:
        """Return the sums so far."""
        counts: Mapping[ClassKey, tuple[list[int], list[int]]] = self._counts
        return tuple(
            ClassStats(key.method, key.name, tuple(drafted), tuple(accepted))
            for key, (drafted, accepted) in counts.items()
        )

"""Simulated time: things that happen later, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clock:
    """Runs actions at their moment; those of the same moment in the order in which they were planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._planned: list[tuple[float, int, Action]] = []
        self._order = count()

    def at(self, time_s: float, action: Action) -> None:
        """Plan `action` for `time_s`, which is not before now."""
        assert time_s >= self.now_s
        heapq.heappush(self._planned, (time_s, next(self._order), action))

    def run(self) -> None:
        """Run until nothing is planned any more."""
        while self._planned:
            self.now_s, _, action = heapq.heappop(self._planned)
            action()

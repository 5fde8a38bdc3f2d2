"""Pauses that grow with each consecutive failure. Callers do the sleeping."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """A pause that doubles from `first` up to `longest`; the caller chooses the unit."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._pause = first

    def next(self) -> float:
        """Return the pause after one more failure."""
        pause = self._pause
        self._pause = min(2 * pause, self._longest)
        return pause

    def reset(self) -> None:
        """Start over, after a success."""
        self._pause = self._first


class BackoffGate:
    """Closes for a growing pause after each failure; failures during a pause count as one.

    Args:
        first_s: the pause after the first failure.
        longest_s: the longest pause.
        clock: seconds.
    """

    def __init__(self, first_s: float, longest_s: float, clock: Callable[[], float]) -> None:
        self._backoff = Backoff(first_s, longest_s)
        self._clock = clock
        self._opens_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """False during the pause after a failure."""
        return self._clock() >= self._opens_at_s

    def failed(self) -> None:
        """Start a pause unless one is running."""
        if self.is_open:
            self._opens_at_s = self._clock() + self._backoff.next()

    def succeeded(self) -> None:
        """End the pause; the next one is short again."""
        self._backoff.reset()
        self._opens_at_s = 0.0

"""Pauses that grow with each failure in a row. It knows no sleep: its users wait, or do without."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """A pause that doubles from `first` up to `longest`, in whatever unit they have."""

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
    """Closes for a growing pause after each failure; failures while it is closed count as one.

    Args:
        first_s: the pause after the first failure.
        longest_s: the limit to which it doubles.
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
        """Begin a pause, unless there is one."""
        if self.is_open:
            self._opens_at_s = self._clock() + self._backoff.next()

    def succeeded(self) -> None:
        """End the pause; the next one is short again."""
        self._backoff.reset()
        self._opens_at_s = 0.0

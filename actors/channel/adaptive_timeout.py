"""The time that one engine step may wait for the draft's offers."""

from __future__ import annotations

_LONGEST_S = 1.0
_SHORTEST_S = 0.02
_TIMES_USUAL = 4.0
_WEIGHT_OF_NEWEST = 0.1


class AdaptiveTimeout:
    """Allows a multiple of the usual answer time, and nothing at all after a miss until the draft is heard again.

    So a draft that hangs costs one wait, and one that is merely slow once is forgiven.
    """

    def __init__(self) -> None:
        self._usual_s: float | None = None
        self._is_silent = False

    @property
    def allowed_s(self) -> float:
        """Seconds a step may wait now."""
        if self._is_silent:
            return 0.0
        if self._usual_s is None:
            return _LONGEST_S
        return min(_LONGEST_S, max(_SHORTEST_S, _TIMES_USUAL * self._usual_s))

    def answered(self, latency_s: float) -> None:
        """The draft was heard `latency_s` after it was asked."""
        self._is_silent = False
        if self._usual_s is None:
            self._usual_s = latency_s
        self._usual_s += _WEIGHT_OF_NEWEST * (latency_s - self._usual_s)

    def heard(self) -> None:
        """The draft said something that it was not asked for, so it is there."""
        self._is_silent = False

    def missed(self) -> None:
        """The deadline passed without the offers that were asked for."""
        self._is_silent = True

"""The time that one engine step may wait for the draft's offers."""

from __future__ import annotations

_LONGEST_S = 1.0
_SHORTEST_S = 0.02
_TIMES_USUAL = 4.0
_WEIGHT_OF_NEWEST = 0.1


class AdaptiveTimeout:
    """Allows a multiple of the usual reply time. After a miss it allows no time until the draft sends again.

    A draft that hangs therefore costs one wait. A draft that was slow once recovers.
    """

    def __init__(self) -> None:
        self._usual_s: float | None = None
        self._is_silent = False

    @property
    def allowed_s(self) -> float:
        """Seconds that a step may wait now."""
        if self._is_silent:
            return 0.0
        if self._usual_s is None:
            return _LONGEST_S
        return min(_LONGEST_S, max(_SHORTEST_S, _TIMES_USUAL * self._usual_s))

    def answered(self, latency_s: float) -> None:
        """Note offers that came `latency_s` after the request."""
        self._is_silent = False
        if self._usual_s is None:
            self._usual_s = latency_s
        self._usual_s += _WEIGHT_OF_NEWEST * (latency_s - self._usual_s)

    def heard(self) -> None:
        """Note offers ahead of a verdict: the draft is alive."""
        self._is_silent = False

    def missed(self) -> None:
        """Note that the requested offers did not come before the deadline."""
        self._is_silent = True

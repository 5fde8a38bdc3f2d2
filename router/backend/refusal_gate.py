"""An ingress's memory of refusals: while all pairs are full, it refuses requests without asking them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from protos.errors import OverloadedError
from protos.messages import GenerateRequest

_NUM_FREE = 3  # consecutive refusals until the gate closes: another pair may have room
_FIRST_PAUSE_S = 0.05  # also the time that a trial request gets to be answered before the next one is let in
_STREAK_S = 1.0  # the longest gap between refusals of one streak
_LONGEST_PAUSE_S = 0.2  # freed places may stay idle for this long, but the pair does not: others wait in its queue


@dataclass(slots=True)
class _Streak:
    """Consecutive refusals of one tenant, and the places of the smallest refused request."""

    num_refusals: int
    num_places: int
    last_s: float
    until_s: float
    spacing_s: float
    error: OverloadedError


class RefusalGate:
    """Closes for a tenant after a few consecutive refusals, for a moment each time; then one request may try.

    Each accepted request halves the pause, so freed places are taken soon and few requests are refused when there is
    room. A refusal by a pair costs as much as the start of a request, in both processes: at a hundred times the
    capacity, refusals would use up the engines' time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._streaks: dict[str, _Streak] = {}

    def check(self, tenant: str, num_places: int) -> None:
        """Raise the last OverloadedError again if a request with this many choices is certain to be refused."""
        streak = self._streaks.get(tenant)
        if streak is None or streak.num_refusals <= _NUM_FREE or num_places < streak.num_places:
            return
        now_s = self._clock()
        if now_s - streak.last_s >= _STREAK_S:
            del self._streaks[tenant]
        elif now_s >= streak.until_s:
            streak.until_s = now_s + streak.spacing_s
        else:
            raise OverloadedError(str(streak.error), retry_after_s=streak.error.retry_after_s)

    def refused(self, request: GenerateRequest, error: OverloadedError) -> None:
        """Record a pair's refusal."""
        now_s = self._clock()
        streak = self._streaks.get(request.tenant)
        num_refusals, num_places = 1, request.num_places
        if streak is not None and now_s - streak.last_s < _STREAK_S:
            num_refusals, num_places = streak.num_refusals + 1, min(streak.num_places, num_places)
        until_s = now_s + self._pause_s(num_refusals)
        self._streaks[request.tenant] = _Streak(num_refusals, num_places, now_s, until_s, _FIRST_PAUSE_S, error)

    @staticmethod
    def _pause_s(num_refusals: int) -> float:
        if num_refusals <= _NUM_FREE:
            return 0.0
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(num_refusals - _NUM_FREE - 1, 8))

    def accepted(self, request: GenerateRequest) -> None:
        """Record that a pair accepted a request."""
        streak = self._streaks.get(request.tenant)
        if streak is None:
            return
        streak.spacing_s /= 2
        streak.until_s = self._clock()
        if streak.num_refusals <= _NUM_FREE or streak.spacing_s < 0.001:
            del self._streaks[request.tenant]

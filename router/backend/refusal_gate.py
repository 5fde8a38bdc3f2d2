"""The memory of an ingress for refusals: while the pairs are full, it refuses by itself what they would refuse."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from protos.errors import OverloadedError
from protos.messages import GenerateRequest

_NUM_FREE = 3  # refusals one after the other until the gate closes: another pair may have room
_FIRST_PAUSE_S = 0.05  # also the time for the answer to a request that tries, before the next one does
_STREAK_S = 1.0  # between refusals that belong together
_LONGEST_PAUSE_S = 0.2  # places that become free meanwhile stay idle, though not the pair: others wait there
_LEAST_SPACING_S = 0.001


@dataclass(slots=True)
class _Streak:
    """Refusals of a tenant one after the other, and the places of the smallest of them."""

    num_refusals: int
    num_places: int
    last_s: float
    until_s: float
    spacing_s: float
    error: OverloadedError


class RefusalGate:
    """Closes for a tenant after a few refusals one after the other, each time for a moment; then one may try.

    Each that is let in halves the time until the next one may try, so that what has become free is soon taken, and few
    meet a refusal where it was one place. A refusal by a pair costs as much as the start of a request, here and there:
    at a hundred times the capacity the frontends would take the time in which the engines could answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._streaks: dict[str, _Streak] = {}

    def check(self, tenant: str, num_places: int) -> None:
        """Raise OverloadedError, the last one anew, if a request of so many choices need not be tried now."""
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
        """Record that a pair let a request in."""
        streak = self._streaks.get(request.tenant)
        if streak is None:
            return
        streak.spacing_s /= 2
        streak.until_s = self._clock()
        if streak.num_refusals <= _NUM_FREE or streak.spacing_s < _LEAST_SPACING_S:
            del self._streaks[request.tenant]

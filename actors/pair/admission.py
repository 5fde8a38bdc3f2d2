"""The bound on the requests inside a pair, and an estimate of the time until the next place is free."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from protos.errors import OverloadedError
from protos.messages import GenerateRequest

_RESERVED_S = 5.0  # for the choices of a request that was admitted to come; they may go to other pairs
_JITTER = 0.25  # of a Retry-After, so that those refused together do not come back together


class Admission:
    """Counts requests; the recent duration of a request gives the Retry-After of a refused one.

    The first choice of a request brings the number of its choices: there is a place for each, or the request is
    refused before any of them runs. The others are never refused, nor is what moves here from a lost pair.
    """

    def __init__(
        self,
        max_requests: int,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`jitter` is in [0, 1)."""
        self.num_refused = 0
        self._max_requests = max_requests
        self._clock = clock
        self._jitter = jitter
        self._num_inside = 0
        self._reserved: dict[str, tuple[int, float]] = {}  # group -> places of choices to come, and until when
        self._usual_duration_s = 1.0

    def enter(self, request: GenerateRequest) -> None:
        """Take a place.

        Raises:
            OverloadedError: there are not enough places.
        """
        if request.is_admitted:
            self._use_reserved(request.group_id)
        else:
            self._check(request.num_places)
            if request.num_places > 1:
                self._reserved[request.group_id] = request.num_places - 1, self._clock() + _RESERVED_S
        self._num_inside += 1

    def leave(self, duration_s: float) -> None:
        """Give the place back after `duration_s`."""
        self._num_inside -= 1
        self._usual_duration_s += 0.1 * (duration_s - self._usual_duration_s)

    def _check(self, num_places: int) -> None:
        """Refuse what has no room; a request of more choices than there are places needs an empty pair."""
        now_s = self._clock()
        self._reserved = {group: place for group, place in self._reserved.items() if place[1] > now_s}
        num_taken = self._num_inside + sum(num for num, _ in self._reserved.values())
        if num_taken and num_taken + num_places > self._max_requests:
            self.num_refused += 1
            asked = f"; this request has {num_places} choices" if num_places > 1 else ""
            raise OverloadedError(
                f"{num_taken} requests are running or queued, and this pair takes {self._max_requests}{asked}; "
                "send it again later, or raise pair.max_queued_requests or pair.num_replicas",
                retry_after_s=self._retry_after_s(num_taken + num_places - self._max_requests),
            )

    def _retry_after_s(self, num_missing: int) -> float:
        """Predict the time until so many places are free: each is given back once in the usual duration."""
        wait_s = max(1.0, num_missing * self._usual_duration_s / self._max_requests)
        return round(wait_s * (1 + _JITTER * self._jitter()), 1)

    def _use_reserved(self, group_id: str) -> None:
        if (reserved := self._reserved.pop(group_id, None)) is not None and reserved[0] > 1:
            self._reserved[group_id] = reserved[0] - 1, reserved[1]

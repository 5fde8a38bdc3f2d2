"""The bound on the requests inside a pair, and an estimate of the time until the next place is free."""

from __future__ import annotations

from protos.errors import OverloadedError


class Admission:
    """Counts requests; the recent duration of a request gives the Retry-After of a refused one."""

    def __init__(self, max_requests: int) -> None:
        self.num_refused = 0
        self._max_requests = max_requests
        self._num_inside = 0
        self._usual_duration_s = 1.0

    def enter(self) -> None:
        """Take a place.

        Raises:
            OverloadedError: all places are taken.
        """
        if self._num_inside >= self._max_requests:
            self.num_refused += 1
            raise OverloadedError(
                f"{self._num_inside} requests are running or queued, and this pair takes {self._max_requests}; "
                "send it again later, or raise pair.max_queued_requests or pair.num_replicas",
                retry_after_s=max(1.0, round(self._usual_duration_s / self._max_requests, 1)),
            )
        self._num_inside += 1

    def leave(self, duration_s: float) -> None:
        """Give the place back after `duration_s`."""
        self._num_inside -= 1
        self._usual_duration_s += 0.1 * (duration_s - self._usual_duration_s)

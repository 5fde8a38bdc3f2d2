"""Times the phases of a sequence before its first tokens, for metrics and traces."""

from __future__ import annotations

from protos.messages import FirstTokenTimes


class FirstTokenClock:
    """Records the engine's time at each change of phase. The transfers add to `transfer_s`."""

    def __init__(self, arrival_s: float) -> None:
        self._arrival_s = arrival_s
        self._admitted_s = arrival_s
        self._times: FirstTokenTimes | None = None
        self.is_committed = False  # the first tokens are committed
        self.transfer_s = 0.0

    def admit(self, now_s: float) -> None:
        """Record that the sequence has its first blocks."""
        self._admitted_s = now_s

    def commit(self, now_s: float) -> float:
        """Record that the first tokens are committed and return the seconds of prefill."""
        self.is_committed = True
        prefill_s = max(0.0, now_s - self._admitted_s - self.transfer_s)
        self._times = FirstTokenTimes(max(0.0, self._admitted_s - self._arrival_s), self.transfer_s, prefill_s)
        return prefill_s

    def take(self) -> FirstTokenTimes | None:
        """Return the phases on the first call after `commit`, None otherwise."""
        times, self._times = self._times, None
        return times

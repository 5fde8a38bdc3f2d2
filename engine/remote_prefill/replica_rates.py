"""Queues and rates of the prefill replicas, learned from their messages and decaying with time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.remote_prefill.kv_transfer import KVChunk, RemoteLoad
from engine.remote_prefill.placement import RemoteOutlook
from protos.backoff import BackoffGate

_WEIGHT_OF_NEWEST = 0.2
_LOAD_LIFETIME_S = 30.0  # a replica that is silent for longer may be gone
_HALF_LIFE_S = 10.0  # of the measured costs per call and per token, so that a once slow path is tried again
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Heard:
    load: RemoteLoad
    at_s: float


class _Fading:
    """A running mean that halves every ten seconds without an observation."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mean = 0.0
        self._at_s = clock()

    @property
    def value(self) -> float:
        return self._mean * float(0.5 ** ((self._clock() - self._at_s) / _HALF_LIFE_S))

    def observe(self, value: float) -> None:
        mean = self.value
        self._mean = mean + _WEIGHT_OF_NEWEST * (value - mean) if mean > 0 else value
        self._at_s = self._clock()


class ReplicaRates:
    """Queue and rate per replica, the cost of a call and of moving a token, and a pause after failures.

    A failure stops orders for one second, each further one twice as long, up to half a minute; a success resumes them.
    Simultaneous failures count as one (`gate`).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, _Heard] = {}
        self._call_s = _Fading(clock)
        self._transfer_s_per_token = _Fading(clock)
        self._first_accepted_s: float | None = None
        self._num_unheard_tokens: dict[int, int] = {}  # of orders that no replica has accepted yet
        self.gate = BackoffGate(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, clock)

    def outlook(self) -> RemoteOutlook:
        """Predict for the next order: the shortest known queue, drained since, plus our unaccepted orders."""
        now_s = self._clock()
        self._heard = {id_: heard for id_, heard in self._heard.items() if now_s - heard.at_s < _LOAD_LIFETIME_S}
        queued = min((_drained(heard, now_s) for heard in self._heard.values()), default=0.0)
        rates = [heard.load.tokens_per_s for heard in self._heard.values() if heard.load.tokens_per_s > 0]
        return RemoteOutlook(
            tokens_per_s=sum(rates) / len(rates) if rates else 0.0,
            num_queued_tokens=queued + sum(self._num_unheard_tokens.values()),
            call_s=self._call_s.value,
            transfer_s_per_token=self._transfer_s_per_token.value,
        )

    def ordered(self, fetch_id: int, num_tokens: int) -> None:
        """Record a sent order."""
        self._num_unheard_tokens[fetch_id] = num_tokens

    def accepted(self, fetch_id: int, load: RemoteLoad, after_s: float) -> None:
        """Record that a replica accepted the order after `after_s`; its queue grows by the order.

        Orders sent before the first acceptance waited for Serve's router to start. They take ten times longer, so the
        cost of a call does not count them.
        """
        num_tokens = self._num_unheard_tokens.pop(fetch_id, 0)
        if self._first_accepted_s is None:
            self._first_accepted_s = self._clock()
        if self._clock() - after_s >= self._first_accepted_s:
            self._call_s.observe(after_s)
        self._hear(RemoteLoad(load.replica_id, load.num_queued_tokens + num_tokens, load.tokens_per_s))

    def arrived(self, chunk: KVChunk, num_tokens: int) -> None:
        """Record that blocks of `num_tokens` tokens have arrived."""
        self._transfer_s_per_token.observe(chunk.transfer_s / num_tokens)
        self._hear(chunk.header.load)

    def ended(self, fetch_id: int) -> None:
        """Record that the fetch has ended or was cancelled."""
        self._num_unheard_tokens.pop(fetch_id, None)

    def _hear(self, load: RemoteLoad) -> None:
        self._heard[load.replica_id] = _Heard(load, self._clock())


def _drained(heard: _Heard, now_s: float) -> float:
    return max(0.0, heard.load.num_queued_tokens - heard.load.tokens_per_s * (now_s - heard.at_s))

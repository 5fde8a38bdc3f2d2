"""Decides whether a prompt is prefilled here or on a prefill replica, from measured rates, in seconds. Pure.

    here    (queued + n x (1 + S)) / rate x (1 + slowdown)
    there   call + remote queue / remote rate + n x transfer + n x max(0, 1 / remote rate - 1 / rate)

n is the number of uncached tokens, S the number of sequences that decode here. While this engine prefills, each of
them waits as long as the prompt does; the first line sums the seconds that all of them lose. The second line is the
time that a replica adds to the prefill itself: the call, its queue, the block transfer, and a slower machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.remote_prefill.kv_transfer import KVChunk, RemoteLoad
from protos.backoff import BackoffGate


@dataclass(frozen=True, slots=True)
class LocalOutlook:
    """This engine: its prefill rate without decodes (0: not measured), and its load."""

    tokens_per_s: float
    slowdown: float  # extra seconds per second of prefill, from the current decodes
    num_queued_tokens: int
    num_decoding: int


@dataclass(frozen=True, slots=True)
class RemoteOutlook:
    """The prefill replicas for the next order; a rate of 0 is not measured and taken as this engine's."""

    tokens_per_s: float
    num_queued_tokens: float
    call_s: float
    transfer_s_per_token: float


@dataclass(frozen=True, slots=True)
class PrefillPlacement:
    """The decision and the cost of both sides."""

    is_remote: bool
    num_tokens: int
    local_s: float
    remote_s: float

    def __str__(self) -> str:
        where = "remote" if self.is_remote else "local"
        return f"{where} prefill of {self.num_tokens} tokens: here {self.local_s:.3f} s, there {self.remote_s:.3f} s"


def place_prefill(num_tokens: int, min_tokens: int, local: LocalOutlook, remote: RemoteOutlook) -> PrefillPlacement:
    """Place a prompt with `num_tokens` uncached tokens; below `min_tokens` it is always prefilled here.

    Until this engine has measured its own rate, a prompt of at least `min_tokens` goes to the replicas. That measures
    their rates without delaying sequences here.
    """
    local_s = _local_s(num_tokens, local)
    remote_s = _remote_s(num_tokens, local.tokens_per_s, remote)
    is_remote = num_tokens >= min_tokens and local_s > remote_s
    return PrefillPlacement(is_remote, num_tokens, local_s, remote_s)


def _local_s(num_tokens: int, local: LocalOutlook) -> float:
    if local.tokens_per_s == 0:
        return float("inf")
    weighted_tokens = local.num_queued_tokens + num_tokens * (1 + local.num_decoding)
    return weighted_tokens / local.tokens_per_s * (1 + local.slowdown)


def _remote_s(num_tokens: int, local_tokens_per_s: float, remote: RemoteOutlook) -> float:
    tokens_per_s = remote.tokens_per_s or local_tokens_per_s
    move_s = remote.call_s + num_tokens * remote.transfer_s_per_token
    if tokens_per_s == 0:
        return move_s
    slower_s = max(0.0, 1 / tokens_per_s - 1 / local_tokens_per_s) if local_tokens_per_s else 0.0
    return move_s + remote.num_queued_tokens / tokens_per_s + num_tokens * slower_s


class _Fading:
    """A running mean that halves every ten seconds without an observation."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mean = 0.0
        self._at_s = clock()

    @property
    def value(self) -> float:
        # Fades within some 10 s, so that a once slow path is tried again.
        return self._mean * float(0.5 ** ((self._clock() - self._at_s) / 10.0))

    def observe(self, value: float) -> None:
        mean = self.value
        self._mean = mean + 0.2 * (value - mean) if mean > 0 else value
        self._at_s = self._clock()


class ReplicaRates:
    """Queue and rate per replica, the cost of a call and of moving a token, and a pause after failures.

    A failure stops orders for one second, each further one twice as long, up to half a minute; a success resumes them.
    Simultaneous failures count as one (`gate`).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, tuple[RemoteLoad, float]] = {}  # the last report of each replica, and its time
        self._call_s = _Fading(clock)
        self._transfer_s_per_token = _Fading(clock)
        self._first_accepted_s: float | None = None
        self._num_unheard_tokens: dict[int, int] = {}  # of orders that no replica has accepted yet
        self.gate = BackoffGate(first_s=1.0, longest_s=30.0, clock=clock)

    def outlook(self) -> RemoteOutlook:
        """Predict for the next order: the shortest known queue, drained since, plus our unaccepted orders."""
        now_s = self._clock()
        # A replica that is silent for longer may be gone.
        self._heard = {id_: heard for id_, heard in self._heard.items() if now_s - heard[1] < 30.0}
        queued = min((_drained(load, now_s - at_s) for load, at_s in self._heard.values()), default=0.0)
        rates = [load.tokens_per_s for load, _ in self._heard.values() if load.tokens_per_s > 0]
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
        self._heard[load.replica_id] = load, self._clock()


def _drained(load: RemoteLoad, after_s: float) -> float:
    return max(0.0, load.num_queued_tokens - load.tokens_per_s * after_s)

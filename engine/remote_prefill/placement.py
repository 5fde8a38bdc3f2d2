"""Decides whether a prompt is prefilled here or on a prefill replica, from measured rates, in seconds. Pure.

    here    (queued + n x (1 + S)) / rate x (1 + slowdown)
    there   call + remote queue / remote rate + n x transfer + n x max(0, 1 / remote rate - 1 / rate)

n is the number of uncached tokens, S the number of sequences that decode here. While this engine prefills, each of
them waits as long as the prompt does; the first line sums the seconds that all of them lose. The second line is the
time that a replica adds to the prefill itself: the call, its queue, the block transfer, and a slower machine.
"""

from __future__ import annotations

from dataclasses import dataclass


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

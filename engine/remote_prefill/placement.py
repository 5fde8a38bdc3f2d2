"""The placement of a prompt: read here or by a prefill replica. A pure decision over measured rates, in seconds.

    here    (queued + n x (1 + S)) / rate x (1 + slowdown)
    there   call + remote queue / remote rate + n x transfer + n x max(0, 1 / remote rate - 1 / rate)

n are the uncached tokens and S the sequences that decode here: while this engine reads the prompt, each of them waits
as long as the prompt does, so the first line counts the seconds that all of them lose together. The second counts the
time that the replica adds to the reading itself: the call, its queue, moving blocks, and a slower machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalOutlook:
    """This engine: its prefill rate with nothing decoding (0: not measured), and its load."""

    tokens_per_s: float
    slowdown: float  # extra seconds per second of prefill, from all that decodes now
    num_queued_tokens: int
    num_decoding: int


@dataclass(frozen=True, slots=True)
class RemoteOutlook:
    """The prefill replicas as a new order meets them; a rate of 0 is not measured, and taken to equal ours."""

    tokens_per_s: float
    num_queued_tokens: float
    call_s: float
    transfer_s_per_token: float


@dataclass(frozen=True, slots=True)
class PrefillPlacement:
    """The decision and its two sides."""

    is_remote: bool
    num_tokens: int
    local_s: float
    remote_s: float

    def __str__(self) -> str:
        where = "remote" if self.is_remote else "local"
        return f"{where} prefill of {self.num_tokens} tokens: here {self.local_s:.3f} s, there {self.remote_s:.3f} s"


def place_prefill(num_tokens: int, min_tokens: int, local: LocalOutlook, remote: RemoteOutlook) -> PrefillPlacement:
    """Decide for a prompt with `num_tokens` uncached tokens; below `min_tokens` it is always read here.

    Before this engine has measured its own rate, a prompt of at least `min_tokens` goes to the replicas, which teaches
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

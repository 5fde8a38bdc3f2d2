"""A recorded sequence of requests, in the one form that the simulator replays."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b

from protos.block_keys import BlockKey


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request; `keys` name its full prompt blocks, so a cached prefix is a common prefix of keys.

    Requests of one session follow each other: none arrives before the answer to the one before it is complete, even
    where `arrival_s` is earlier. A request with an empty `session_id` depends on no other.
    """

    arrival_s: float
    session_id: str
    num_tokens: int
    num_output_tokens: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, the first at 0 s."""

    name: str
    block_size: int  # tokens per key
    requests: tuple[TraceRequest, ...]

    @property
    def span_s(self) -> float:
        """Time between the first and the last arrival."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def ideal_hit_rate(self) -> float:
        """Share of prompt tokens that one endless cache, filled at once, would serve."""
        seen: set[BlockKey] = set()
        num_hits = 0
        for request in self.requests:
            num_hits += num_cached_blocks(request, self.block_size, seen)
            seen.update(request.keys)
        return num_hits * self.block_size / self.num_tokens

    def stretched(self, factor: float) -> Trace:
        """Return the same requests with every arrival time multiplied by `factor`."""
        moved = (replace(request, arrival_s=request.arrival_s * factor) for request in self.requests)
        return replace(self, requests=tuple(moved))

    def head(self, num_requests: int) -> Trace:
        """Return the first requests only."""
        return replace(self, requests=self.requests[:num_requests])


def sorted_trace(name: str, block_size: int, requests: Iterable[TraceRequest]) -> Trace:
    """Return a trace of these requests, put in order of arrival and moved so that the first comes at 0 s."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    start_s = ordered[0].arrival_s
    return Trace(name, block_size, tuple(replace(r, arrival_s=r.arrival_s - start_s) for r in ordered))


def num_cached_blocks(request: TraceRequest, block_size: int, cached: Container[BlockKey]) -> int:
    """Leading blocks of the prompt that are in `cached`.

    Never the last token, whose logits give the first of the answer.
    """
    most = min(len(request.keys), (request.num_tokens - 1) // block_size)
    for depth, key in enumerate(request.keys[:most]):
        if key not in cached:
            return depth
    return most


def trace_key(*parts: object) -> BlockKey:
    """Return a block key for something that a trace names by number or text."""
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()

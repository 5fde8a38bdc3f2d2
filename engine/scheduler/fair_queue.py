"""The turns of waiting requests: tenants get tokens in proportion to their weights, however many they ask for.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request's turn is the end of its tenant's request before it,
but not before the turn that is being served. A lower priority is a later turn by a fixed number of tokens, so that one
that waits is passed by a bounded amount of others' work and not for ever.
"""

from __future__ import annotations

from protos.messages import GenerateRequest

PRIORITY_TOKENS = 1 << 16  # tokens of others' work that one step of priority is worth


class FairQueue:
    """Gives each request its turn; knows no clock and no rate: turns are counted in tokens over weight."""

    def __init__(self) -> None:
        self._now = 0.0  # the turn that was served last
        self._ends: dict[tuple[str, int], float] = {}  # of each tenant's last request, by priority; later than now

    def turn(self, request: GenerateRequest, num_tokens: int) -> float:
        """Return the turn of a request that may read and write `num_tokens`; the lower, the sooner."""
        flow = request.tenant, request.priority
        start = max(self._now, self._ends.get(flow, 0.0))
        self._ends[flow] = start + num_tokens / request.weight
        return start + request.priority * PRIORITY_TOKENS

    def serve(self, request: GenerateRequest, turn: float) -> None:
        """Advance to the turn of a request that is admitted."""
        self._now = max(self._now, turn - request.priority * PRIORITY_TOKENS)
        self._ends = {flow: end for flow, end in self._ends.items() if end > self._now}

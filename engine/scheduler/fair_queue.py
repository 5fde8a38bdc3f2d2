"""Orders waiting requests so that tenants get tokens in proportion to their weights, however many they ask for.

This is start-time fair queueing (Goyal, Vin and Cheng, 1996): a request's turn is the end of its tenant's last request,
or the turn being served now if that is later. A lower priority delays the turn by a fixed number of tokens, so the
work that overtakes a waiting request is bounded.
"""

from __future__ import annotations

from protos.messages import GenerateRequest

PRIORITY_TOKENS = 1 << 16  # one step of priority delays a turn by so many tokens


class FairQueue:
    """Assigns turns. A turn is measured in tokens divided by weight, so no clock and no rate is needed."""

    def __init__(self) -> None:
        self._now = 0.0  # the turn served last
        self._ends: dict[tuple[str, int], float] = {}  # end of the last request by tenant and priority, if after now

    def turn(self, request: GenerateRequest, num_tokens: int) -> float:
        """Return the turn of a request of at most `num_tokens` of prompt and output. Lower turns come first."""
        flow = request.tenant, request.priority
        start = max(self._now, self._ends.get(flow, 0.0))
        self._ends[flow] = start + num_tokens / request.weight
        return start + request.priority * PRIORITY_TOKENS

    def serve(self, request: GenerateRequest, turn: float) -> None:
        """Advance to the turn of a request that is admitted."""
        self._now = max(self._now, turn - request.priority * PRIORITY_TOKENS)
        self._ends = {flow: end for flow, end in self._ends.items() if end > self._now}

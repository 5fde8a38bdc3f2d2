"""The quality of routing: achieved against achievable reuse, counted per request afterwards.

Achievable is the most blocks that any live worker held when the request was routed. `achieved / achievable` shows the
reuse lost to load balancing and to stale knowledge.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouteForecast:
    """The router's expectation for one request.

    Attributes:
        predicted_blocks: leading blocks of the request that the chosen worker holds or will soon.
        achievable_blocks: the most that any candidate holds.
        cost_s: predicted cost of the chosen worker.
        runner_up_cost_s: predicted cost of the best other candidate; infinite without another.
        block_prefill_s: seconds the chosen worker needs to compute one block.
    """

    predicted_blocks: int
    achievable_blocks: int
    cost_s: float
    runner_up_cost_s: float
    block_prefill_s: float


@dataclass(frozen=True, slots=True)
class RouteOutcome:
    """One routed request: the forecast, and the blocks that the engine took from its cache."""

    forecast: RouteForecast
    achieved_blocks: int

    @property
    def is_stale(self) -> bool:
        """True if the engine no longer had blocks that the index promised."""
        return self.achieved_blocks < self.forecast.predicted_blocks

    @property
    def is_misroute(self) -> bool:
        """True if another worker would have been cheaper, given the engine's actual blocks."""
        lost_s = (self.forecast.predicted_blocks - self.achieved_blocks) * self.forecast.block_prefill_s
        return self.is_stale and self.forecast.cost_s + lost_s > self.forecast.runner_up_cost_s

    @property
    def is_unforeseen(self) -> bool:
        """True if the engine hit although the router expected no cached block."""
        return self.forecast.predicted_blocks == 0 < self.achieved_blocks


@dataclass(slots=True)
class RouteAudit:
    """Sums over all requests observed since the start."""

    num_requests: int = 0
    num_achievable_blocks: int = 0
    num_achieved_blocks: int = 0
    num_unforeseen_hits: int = 0
    num_expected_hits: int = 0  # predicted and found
    num_unforeseen_in_a_row: int = 0  # without an expected hit between them

    def observe(self, outcome: RouteOutcome) -> None:
        """Add one request."""
        self.num_requests += 1
        self.num_achievable_blocks += outcome.forecast.achievable_blocks
        self.num_achieved_blocks += outcome.achieved_blocks
        self.num_unforeseen_hits += outcome.is_unforeseen
        is_expected = min(outcome.forecast.predicted_blocks, outcome.achieved_blocks) > 0
        self.num_expected_hits += is_expected
        self.num_unforeseen_in_a_row = 0 if is_expected else self.num_unforeseen_in_a_row + outcome.is_unforeseen

    @property
    def efficiency(self) -> float:
        """Achieved over achievable blocks; 1 if no block was achievable, above 1 if engines hit more than was known."""
        return self.num_achieved_blocks / self.num_achievable_blocks if self.num_achievable_blocks else 1.0

    @property
    def is_blind(self) -> bool:
        """True if engines keep hitting prefixes that the router did not expect, and never those it predicted.

        Their block keys differ then, or the index receives no reports. One predicted hit clears the alarm and restarts
        the count.
        """
        return self.num_unforeseen_in_a_row >= 20

"""The wait for the drafts of each method: a draft model's is not another's, and a text match costs next to nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.proposer.adaptive.forward_cost import DraftCost


@dataclass(frozen=True, slots=True)
class AskedDrafts:
    """Drafts of one method that a pass asked for: steps of the longest one, and tokens of all."""

    num_steps: int
    num_tokens: int


class DraftCosts:
    """One `DraftCost` per method. Where several draft for one pass, its wait is divided between them.

    What a method costs is known by passes for which it drafted alone, and estimated until there was one.
    """

    def __init__(self) -> None:
        self._costs: dict[str, DraftCost] = defaultdict(DraftCost)
        self._known: set[str] = set()

    def knows(self, method: str) -> bool:
        """True if a pass has told what this method's drafts cost, alone or beside others."""
        return self._costs[method].is_known

    def prices(self, methods: Sequence[str]) -> tuple[float, float]:
        """Return the seconds per step and per token of a pass whose sequences draft by these methods, one for each."""
        counts = Counter(methods)
        step_s = sum(self._costs[method].per_step_s for method in counts)
        token_s = sum(self._costs[method].per_token_s * count for method, count in counts.items())
        return step_s, token_s / len(methods)

    def seconds(self, asked: Mapping[str, AskedDrafts]) -> float:
        """Return the expected wait; 0 while nothing is known."""
        return sum(self._costs[method].seconds(each.num_steps, each.num_tokens) for method, each in asked.items())

    def shares(self, asked: Mapping[str, AskedDrafts]) -> dict[str, float]:
        """Return each method's part of a wait: as they cost alone, or by tokens until that is known of all."""
        parts = {method: self._costs[method].seconds(each.num_steps, each.num_tokens) for method, each in asked.items()}
        if min(parts.values(), default=0.0) <= 0.0:
            parts = {method: float(each.num_tokens) for method, each in asked.items()}
        whole = sum(parts.values())
        return {method: part / whole for method, part in parts.items()}

    def observe(self, asked: Mapping[str, AskedDrafts], seconds: float) -> None:
        """Take in the wait of one pass."""
        if len(asked) == 1 and not self._known.issuperset(asked):
            self._known.update(asked)
            self._costs.update({method: DraftCost() for method in asked})
        for method, share in self.shares(asked).items():
            if len(asked) == 1 or method not in self._known:
                self._costs[method].observe(asked[method].num_steps, asked[method].num_tokens, share * seconds)

"""The time to wait for drafts, by method: draft models differ, and a text match costs almost nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.accounting.forward_cost import DraftCost


@dataclass(frozen=True, slots=True)
class RequestedDrafts:
    """The drafts that a pass requests from one method: steps of the longest draft, and tokens of all drafts."""

    num_steps: int
    num_tokens: int


class DraftCosts:
    """One `DraftCost` per method. If several methods draft for one pass, its wait is divided between them.

    The cost of a method is measured in passes where it drafts alone, and estimated before the first such pass.
    """

    def __init__(self) -> None:
        self._costs: dict[str, DraftCost] = defaultdict(DraftCost)
        self._known: set[str] = set()

    def knows(self, method: str) -> bool:
        """True if a pass has measured this method's drafts, alone or with others."""
        return self._costs[method].is_known

    def prices(self, methods: Sequence[str]) -> tuple[float, float]:
        """Return the seconds per step and per token of a pass; `methods` has one method per sequence."""
        counts = Counter(methods)
        step_s = sum(self._costs[method].per_step_s for method in counts)
        token_s = sum(self._costs[method].per_token_s * count for method, count in counts.items())
        return step_s, token_s / len(methods)

    def seconds(self, requested: Mapping[str, RequestedDrafts]) -> float:
        """Return the expected wait; 0 before anything is measured."""
        return sum(self._costs[method].seconds(each.num_steps, each.num_tokens) for method, each in requested.items())

    def shares(self, requested: Mapping[str, RequestedDrafts]) -> dict[str, float]:
        """Return each method's share of a wait: by measured costs, or by tokens until all methods are measured."""
        parts = {
            method: self._costs[method].seconds(each.num_steps, each.num_tokens) for method, each in requested.items()
        }
        if min(parts.values(), default=0.0) <= 0.0:
            parts = {method: float(each.num_tokens) for method, each in requested.items()}
        whole = sum(parts.values())
        return {method: part / whole for method, part in parts.items()}

    def observe(self, requested: Mapping[str, RequestedDrafts], seconds: float) -> None:
        """Record the wait of one pass."""
        if len(requested) == 1 and not self._known.issuperset(requested):
            self._known.update(requested)
            self._costs.update({method: DraftCost() for method in requested})
        for method, share in self.shares(requested).items():
            if len(requested) == 1 or method not in self._known:
                self._costs[method].observe(requested[method].num_steps, requested[method].num_tokens, share * seconds)

"""The seconds that drafts cost, by method: per request, step and token, learned from earlier passes."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from operator import mul
from typing import NamedTuple


class DraftPrices(NamedTuple):
    """The seconds that drafts cost: one request for them, each step of the longest draft, and each token."""

    request_s: float
    step_s: float
    token_s: float

    def seconds(self, num_steps: float, num_tokens: float) -> float:
        """Return the seconds of a request for drafts of this size."""
        return self.request_s + self.step_s * num_steps + self.token_s * num_tokens


class DraftCost:
    """The seconds that the target waits for drafts.

    The ratios of the costs are fitted by least squares over recent passes, without negative costs, and their level by
    the median pass, which an outlier does not move. If steps and tokens were always equal (one stream), the time is
    attributed to the steps, since a draft model computes a step of all sequences at once. A request costs messages, and
    the tokens since the last draft: as much as a step, until drafts of several lengths have shown its cost.
    """

    _NUM_RECENT = 15
    _FIT_PERIOD = 4  # passes between two fits, which take most of the time here
    _FADE = 0.95
    _REQUEST_DOUBT = 0.03
    _TOKEN_DOUBT = 0.01
    _SWEEPS = 20  # of a fit, which starts from the last one

    def __init__(self) -> None:
        # Decayed sums over passes: the products of (1, steps, tokens) in pairs, and with the seconds.
        self._products: list[list[float]] = [[0.0] * 3 for _ in range(3)]
        self._times_s = [0.0] * 3
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=self._NUM_RECENT)  # steps, tokens, seconds
        self._num_passes = 0
        self.prices = DraftPrices(0.0, 0.0, 0.0)

    @property
    def is_known(self) -> bool:
        """True after the first observed pass."""
        return bool(self._recent)

    def observe(self, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Record one pass that requested `num_tokens` draft tokens, with `num_steps` in the longest draft."""
        self._recent.append((num_steps, num_tokens, seconds))
        expected_s = self.seconds(num_steps, num_tokens)
        if expected_s > 0:
            seconds = min(seconds, 2.0 * expected_s)
        sizes = (1, num_steps, num_tokens)
        for row, (size, sums) in enumerate(zip(sizes, self._products, strict=True)):
            self._products[row] = [self._FADE * each + size * other for each, other in zip(sums, sizes, strict=True)]
            self._times_s[row] = self._FADE * self._times_s[row] + size * seconds
        self._num_passes += 1
        if self._num_passes < self._NUM_RECENT or self._num_passes % self._FIT_PERIOD == 0:
            self._fit()

    def seconds(self, num_steps: int, num_tokens: int) -> float:
        """Return the expected seconds of drafts of this size; 0 before the first observed pass."""
        return self.prices.seconds(num_steps, num_tokens)

    def _fit(self) -> None:
        """Solve the normal equations by coordinate descent, then scale the costs to the median pass."""
        # Small ridges prefer steps to tokens, and a request as dear as a step.
        products = [[*row] for row in self._products]
        ridge = self._REQUEST_DOUBT * products[0][0]
        for first, second, sign in ((0, 0, 1), (1, 1, 1), (0, 1, -1), (1, 0, -1)):
            products[first][second] += sign * ridge
        products[2][2] *= 1.0 + self._TOKEN_DOUBT
        costs = [*self.prices]
        for _ in range(self._SWEEPS):
            for i, (row, time_s) in enumerate(zip(products, self._times_s, strict=True)):
                others_s = sum(map(mul, row, costs)) - row[i] * costs[i]
                costs[i] = max(0.0, (time_s - others_s) / row[i])
        prices = DraftPrices(*costs)
        # Scale to the median pass.
        ratios = sorted(
            [
                seconds / fitted_s
                for steps, tokens, seconds in self._recent
                if (fitted_s := prices.seconds(steps, tokens)) > 0.0
            ]
        )
        scale = ratios[(len(ratios) - 1) // 2] if ratios else 1.0
        self.prices = DraftPrices(*[scale * each for each in costs])


class RequestedDrafts(NamedTuple):
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

    def prices(self, methods: Sequence[str]) -> DraftPrices:
        """Return the prices of a pass; `methods` has one method per sequence."""
        counts = Counter(methods)
        all_prices = [(self._costs[method].prices, count) for method, count in counts.items()]
        return DraftPrices(
            sum(each.request_s for each, _ in all_prices),
            sum(each.step_s for each, _ in all_prices),
            sum(each.token_s * count for each, count in all_prices) / len(methods),
        )

    def seconds(self, requested: Mapping[str, RequestedDrafts]) -> float:
        """Return the expected wait; 0 before anything is measured."""
        return sum(self._costs[method].seconds(each.num_steps, each.num_tokens) for method, each in requested.items())

    def shares(self, requested: Mapping[str, RequestedDrafts]) -> dict[str, float]:
        """Return each method's share of a wait: by measured costs, or by tokens until all methods are measured."""
        if len(requested) < 2:
            return dict.fromkeys(requested, 1.0)
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

"""The seconds that drafts cost, by method: per step and per token, learned from earlier passes."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

REQUEST_STEPS = 1  # steps that cost as much as a request for drafts


class DraftCost:
    """The seconds that the target waits for drafts: a cost per step of the longest draft, and a cost per token.

    The ratio of the two costs is fitted by least squares over recent passes, and their level by the median pass, which
    an outlier does not move. If steps and tokens were always equal (one stream), the time is attributed to the steps,
    since a draft model computes a step of all sequences at once. A request for drafts costs a step by itself: messages,
    and the tokens since the last draft. Without it drafts of one token would make longer ones look too expensive.
    """

    _NUM_RECENT = 15
    _FIT_PERIOD = 4  # passes between two fits, which take most of the time here
    _FADE = 0.95
    _TOKEN_DOUBT = 0.01
    _STEP_DOUBT = 1e-6

    def __init__(self) -> None:
        self._steps_2 = self._steps_tokens = self._tokens_2 = 0.0  # decayed sums of products
        self._steps_s = self._tokens_s = 0.0
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=self._NUM_RECENT)  # steps, tokens, seconds
        self._num_passes = 0
        self.per_step_s = 0.0
        self.per_token_s = 0.0

    @property
    def is_known(self) -> bool:
        """True after the first observed pass."""
        return bool(self._recent)

    def observe(self, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Record one pass that requested `num_tokens` draft tokens, with `num_steps` in the longest draft."""
        num_steps += REQUEST_STEPS
        self._recent.append((num_steps, num_tokens, seconds))
        expected_s = self.per_step_s * num_steps + self.per_token_s * num_tokens
        if expected_s > 0:
            seconds = min(seconds, 2.0 * expected_s)
        self._steps_2 = self._FADE * self._steps_2 + num_steps * num_steps
        self._steps_tokens = self._FADE * self._steps_tokens + num_steps * num_tokens
        self._tokens_2 = self._FADE * self._tokens_2 + num_tokens * num_tokens
        self._steps_s = self._FADE * self._steps_s + num_steps * seconds
        self._tokens_s = self._FADE * self._tokens_s + num_tokens * seconds
        self._num_passes += 1
        if self._num_passes < self._NUM_RECENT or self._num_passes % self._FIT_PERIOD == 0:
            self._fit()

    def seconds(self, num_steps: int, num_tokens: int) -> float:
        """Return the expected seconds of drafts of this size; 0 before the first observed pass."""
        return self.per_step_s * (num_steps + REQUEST_STEPS) + self.per_token_s * num_tokens

    def _fit(self) -> None:
        """Solve the two normal equations without negative costs, then scale both costs to the median pass."""
        # Least squares, with a small ridge that prefers steps.
        steps_2 = (1.0 + self._STEP_DOUBT) * self._steps_2
        tokens_2 = (1.0 + self._TOKEN_DOUBT) * self._tokens_2
        determinant = steps_2 * tokens_2 - self._steps_tokens**2
        per_step_s = (tokens_2 * self._steps_s - self._steps_tokens * self._tokens_s) / determinant
        per_token_s = (steps_2 * self._tokens_s - self._steps_tokens * self._steps_s) / determinant
        if per_token_s < 0:
            per_step_s, per_token_s = self._steps_s / self._steps_2, 0.0
        elif per_step_s < 0:
            per_step_s, per_token_s = 0.0, self._tokens_s / self._tokens_2
        # Scale to the median pass.
        ratios = sorted(
            [
                seconds / fitted_s
                for steps, tokens, seconds in self._recent
                if (fitted_s := steps * per_step_s + tokens * per_token_s) > 0.0
            ]
        )
        scale = ratios[(len(ratios) - 1) // 2] if ratios else 1.0
        self.per_step_s, self.per_token_s = scale * per_step_s, scale * per_token_s


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

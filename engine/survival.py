"""How far drafts survive: the chance that draft i of a sequence stands, from the passes it and its like have had."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FIRST_GUESS = 0.7  # acceptance of a class that nobody has seen yet
_CLASS_WINDOW = 100.0  # passes of a class that count
_REQUEST_WINDOW = 20.0  # passes of a request that count
_CLASS_TRUST = 4.0  # passes that the position before (or the first guess) is worth to a class
_REQUEST_TRUST = 8.0  # passes that the class is worth to a request


class SurvivalTable:
    """Conditional acceptance by position, of each request and of each class of requests, over recent passes.

    A rate is that of draft i given that all before it stood, so it does not depend on how long drafts were. A request's
    rate leans on its class's until it has passes of its own, and a class's rate on that of the position before. A
    position forgets only when it is tried. `observe` takes counts: nothing here has ever seen a drafted token.
    """

    def __init__(self, num_positions: int) -> None:
        self._positions = np.arange(num_positions)  # [K]
        self._requests: dict[str, _Counts] = {}
        self._classes: dict[str, _Counts] = {}

    def observe(self, request_ids: Seq[str], classes: Seq[str], num_proposed: Ints, num_accepted: Ints) -> None:
        """Take in one pass: per sequence its id, its class, and how many drafts it had and kept, `[B]` each."""
        is_tried = self._positions < np.minimum(num_proposed, num_accepted + 1)[:, None]  # [B, K]
        is_accepted = self._positions < num_accepted[:, None]
        for index in np.flatnonzero(num_proposed).tolist():
            request = self._of(self._requests, request_ids[index])
            request.add(is_tried[index], is_accepted[index], _REQUEST_WINDOW)
            self._of(self._classes, classes[index]).add(is_tried[index], is_accepted[index], _CLASS_WINDOW)

    def keep_only(self, request_ids: Seq[str]) -> None:
        """Forget all other requests; what they taught stays with their class."""
        if len(self._requests) > len(request_ids):
            known = {each: self._requests[each] for each in request_ids if each in self._requests}
            self._requests = known

    def of(self, request_ids: Seq[str], classes: Seq[str]) -> Floats:
        """The chance that each draft stands, all before it included: `[B, K]`, falling along K."""
        priors = {name: self._class_rates(name) for name in set(classes)}
        prior = np.array([priors[name] for name in classes])  # [B, K]
        nothing = _Counts(len(self._positions))
        counts = [self._requests.get(each, nothing) for each in request_ids]
        accepted = np.array([each.accepted for each in counts])
        tried = np.array([each.tried for each in counts])
        rates: Floats = (accepted + _REQUEST_TRUST * prior) / (tried + _REQUEST_TRUST)
        return rates.cumprod(axis=1)

    def _class_rates(self, name: str) -> list[float]:
        counts = self._of(self._classes, name)
        rates, rate = [], _FIRST_GUESS
        for accepted, tried in zip(counts.accepted.tolist(), counts.tried.tolist(), strict=True):
            rate = (accepted + _CLASS_TRUST * rate) / (tried + _CLASS_TRUST)
            rates.append(rate)
        return rates

    def _of(self, counts: dict[str, _Counts], key: str) -> _Counts:
        if key not in counts:
            counts[key] = _Counts(len(self._positions))
        return counts[key]


class _Counts:
    """Passes that tried each position, and those that kept it, `[K]`; old ones fade."""

    def __init__(self, num_positions: int) -> None:
        self.tried = np.zeros(num_positions)
        self.accepted = np.zeros(num_positions)

    def add(self, is_tried: NDArray[np.bool_], is_accepted: NDArray[np.bool_], window: float) -> None:
        fade = np.where(is_tried, 1.0 - 1.0 / window, 1.0)
        self.tried = fade * self.tried + is_tried
        self.accepted = fade * self.accepted + is_accepted

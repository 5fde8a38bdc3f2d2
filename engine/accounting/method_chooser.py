"""Chooses the method of requests that leave it open, by the measured speed of each method in the request's class.

A bandit over the methods on offer, per class of requests. Its reward is the goodput: tokens per second relative to
plain decoding, with the cost of drafting included (`engine.accounting.speculation_gate`). A fixed share of the
requests explores, since traffic drifts and old measurements lose their value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

EXPLORED = 16  # one request in 16 goes to the method that was used longest ago

Goodput = Callable[[str, str], float | None]  # (method, class) -> goodput; None if not measured


class MethodChooser:
    """Chooses by counts and times of earlier passes only, never by a token that depends on the choice.

    Args:
        methods: The methods to choose from.
        goodput: Their measured goodput.
    """

    def __init__(self, methods: Sequence[str], goodput: Goodput) -> None:
        self._methods = tuple(methods)
        self._goodput = goodput
        self._classes: dict[str, _ClassChoices] = {}

    def choose(self, name: str) -> str:
        """Return the method of the next request of class `name`."""
        if name not in self._classes:
            self._classes[name] = _ClassChoices(name, self._methods)
        return self._classes[name].next({each: self._goodput(each, name) for each in self._methods})


class _ClassChoices:
    """The state of one class: each method's latest request, and the best method so far."""

    def __init__(self, name: str, methods: Sequence[str]) -> None:
        self._name = name
        self._latest = dict.fromkeys(methods, 0)
        self._num_requests = 0
        self._best: str | None = None

    def next(self, goodputs: dict[str, float | None]) -> str:
        """Choose a method that is not measured; else the best one, or sometimes the one used longest ago."""
        self._num_requests += 1
        unknown = [method for method, goodput in goodputs.items() if goodput is None]
        if unknown:
            chosen = min(unknown, key=self._latest.__getitem__)
        elif self._num_requests % EXPLORED == 0:
            chosen = min(self._latest, key=self._latest.__getitem__)
        else:
            chosen = max(goodputs, key=lambda method: goodputs[method] or 0.0)
            self._report(chosen, goodputs)
        self._latest[chosen] = self._num_requests
        return chosen

    def _report(self, best: str, goodputs: dict[str, float | None]) -> None:
        if best != self._best:
            figures = ", ".join(f"{method} {goodput:.2f}" for method, goodput in goodputs.items())
            logger.info("%s requests now use %s; speedup over plain decoding: %s", self._name, best, figures)
            self._best = best

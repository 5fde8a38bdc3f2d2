"""The method of each request that leaves it open: the one whose drafts have made most of its class's passes.

A bandit over the methods on offer, per class of requests. Its reward is the measured goodput, tokens per second over
those of plain decoding (`engine.proposer.adaptive.speculation_gate`), which counts what drafting costs. Its exploration
is a fixed share of the requests, since traffic drifts and a figure that is not renewed grows old.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

EXPLORED = 16  # one request of so many goes to the method that has been left alone longest

Goodput = Callable[[str, str], float | None]  # of a method and a class; None: not measured


class MethodChooser:
    """Chooses by counts and by times of earlier passes alone, never by a token that the choice decides about.

    Args:
        methods: those among which it chooses.
        goodput: their measured goodput.
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
    """The choices of one class: each method's latest request, and the best one so far."""

    def __init__(self, name: str, methods: Sequence[str]) -> None:
        self._name = name
        self._latest = dict.fromkeys(methods, 0)
        self._num_requests = 0
        self._best: str | None = None

    def next(self, goodputs: dict[str, float | None]) -> str:
        """Try what is not measured, one request of some what was left alone, and use the best for the others."""
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
            logger.info("%s requests are drafted for by %s now; over plain decoding: %s", self._name, best, figures)
            self._best = best

"""Routing metrics of every request: reuse against achievable reuse, and the cost of the choice."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.routing.routed_call import Route, RouteOutcome

logger = logging.getLogger(__name__)

_DECISION_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1)
_BLOCK_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class RouterMetrics:
    """The `outrider_router_*` families of one ingress replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._num_unforeseen = 0  # hits since the last one that was predicted
        self._hit = self._counter("hit_blocks", "Prompt blocks that engines took from their cache.")
        self._achievable = self._counter("achievable_blocks", "The most blocks that any pair held for the request.")
        self._predicted = self._counter("predicted_blocks", "Blocks that the chosen pairs were expected to hold.")
        self._stale = self._counter("stale_answers", "Requests whose engine held less than the index reported.")
        self._misroutes = self._counter("misroutes", "Stale answers that cost more than the next best pair.")
        self._unforeseen = self._counter("unforeseen_hits", "Engine hits where the index expected no cached block.")
        self._decisions = Counter(
            "outrider_router_decisions",
            "Choices by basis: the index; load alone because the index was silent (timeout), gone (away) or broken "
            "(error), or its choice refused the request (diverted); ended: the request ended before its first token.",
            ("basis",),
            registry=registry,
        )
        self._decision = Histogram(
            "outrider_router_decision_seconds",
            "Time from the query to the index until its reply or time-out.",
            buckets=_DECISION_BUCKETS_S,
            registry=registry,
        )
        self._hit_histogram = self._blocks("request_hit_blocks", "Blocks found per request.")
        self._achievable_histogram = self._blocks("request_achievable_blocks", "Blocks some pair held, per request.")
        self._blind = self._gauge("blind", "1: block keys of engines and router differ, or the index gets no reports.")
        self._known = self._gauge("index_blocks", "Distinct blocks in the index, which all ingress replicas share.")
        self._doubtful = self._gauge("index_doubtful_pairs", "Pairs whose snapshot the index is waiting for.")

    def record_choice(self, route: Route, *, is_ended: bool = False) -> None:
        """Count a choice; of a request that ended before its first token (`is_ended`), no outcome is recorded."""
        self._decision.observe(route.decision_s)
        self._decisions.labels("ended" if is_ended else route.failure or "index").inc()
        if route.reply is not None:
            self._known.set(route.reply.num_known_blocks)
            self._doubtful.set(route.reply.num_doubtful_workers)

    def record_outcome(self, outcome: RouteOutcome) -> None:
        """Count the blocks that an engine reported as found in its cache."""
        was_blind = self._is_blind
        is_expected = min(outcome.reply.predicted_blocks, outcome.achieved_blocks) > 0
        self._num_unforeseen = 0 if is_expected else self._num_unforeseen + outcome.is_unforeseen
        self._hit.inc(outcome.achieved_blocks)
        self._achievable.inc(outcome.reply.achievable_blocks)
        self._predicted.inc(outcome.reply.predicted_blocks)
        self._hit_histogram.observe(outcome.achieved_blocks)
        self._achievable_histogram.observe(outcome.reply.achievable_blocks)
        self._stale.inc(outcome.is_stale)
        self._misroutes.inc(outcome.is_misroute)
        self._unforeseen.inc(outcome.is_unforeseen)
        if self._is_blind != was_blind:
            self._alarm()

    @property
    def _is_blind(self) -> bool:
        """True if engines keep hitting prefixes that the router did not expect, and never those it predicted.

        Their block keys differ then, or the index receives no reports. One predicted hit clears the alarm and restarts
        the count.
        """
        return self._num_unforeseen >= 20

    def set_refuted(self, is_refuted: bool) -> None:
        """Set the alarm that engines and router compute different keys."""
        self._blind.set(is_refuted or self._is_blind)

    def _alarm(self) -> None:
        self._blind.set(self._is_blind)
        if self._is_blind:
            logger.error(
                "engines have found %d cached prefixes that the router did not predict, and no predicted ones: the "
                "index does not get their reports; look for IndexActor in Ray's logs",
                self._num_unforeseen,
            )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"outrider_router_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"outrider_router_{name}", text, registry=self._registry)

    def _blocks(self, name: str, text: str) -> Histogram:
        return Histogram(f"outrider_router_{name}", text, buckets=_BLOCK_BUCKETS, registry=self._registry)

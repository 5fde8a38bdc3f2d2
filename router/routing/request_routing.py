"""Routing in the ingress: a request's block keys before the choice, then metrics of its cost and of its outcome."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protos.block_keys import PROBE_SALT, block_keys, join_keys, probe_token_ids, root_key
from protos.messages import GenerateRequest, TokenChunk
from protos.served_model import ModelCard
from router.api_keys import current_client
from router.routing.routed_call import Route, RoutedCall, RouteReply

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

    def record_outcome(self, reply: RouteReply, num_found: int) -> None:
        """Count the blocks of a request that the engine found in its cache."""
        was_blind = self._is_blind
        num_missing = reply.predicted_blocks - num_found
        is_stale, is_unforeseen = num_missing > 0, reply.predicted_blocks == 0 < num_found
        is_expected = min(reply.predicted_blocks, num_found) > 0
        self._num_unforeseen = 0 if is_expected else self._num_unforeseen + is_unforeseen
        self._hit.inc(num_found)
        self._achievable.inc(reply.achievable_blocks)
        self._predicted.inc(reply.predicted_blocks)
        self._hit_histogram.observe(num_found)
        self._achievable_histogram.observe(reply.achievable_blocks)
        self._stale.inc(is_stale)
        # A misroute: another worker would have been cheaper, given the blocks that the engine really had.
        self._misroutes.inc(is_stale and reply.cost_s + num_missing * reply.block_prefill_s > reply.runner_up_cost_s)
        self._unforeseen.inc(is_unforeseen)
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


class PromptKeys:
    """The block keys of requests for the last card's model; empty without a card, or if it fails the check."""

    def __init__(self) -> None:
        self._card: ModelCard | None = None
        self._is_proven = False
        self._last_text: tuple[tuple[int, ...], tuple[int, ...], str] | None = None
        self._last_keys = b""

    @property
    def is_refuted(self) -> bool:
        """True if the engines' keys of a fixed text differ from this process's: requests are routed by load alone."""
        return self._card is not None and not self._is_proven

    def learn(self, card: ModelCard) -> None:
        """Store a pair's card; check a changed one."""
        card = replace(card, alarms=())
        if card == self._card:
            return
        self._card = card
        self._last_text = None
        own = _probe_key(card)
        self._is_proven = own == card.probe_key
        if not self._is_proven:
            logger.error(
                "pairs and ingress compute different block keys (probe %s there, %s here, model version %s, "
                "block size %d): requests are routed by load alone; deploy both from one version",
                card.probe_key.hex() or "missing",
                own.hex(),
                card.model_version,
                card.block_size,
            )

    def keys_of(self, request: GenerateRequest) -> bytes:
        """Return the joined keys of the full blocks of prompt and output; samples of one prompt share the work."""
        card = self._card
        if card is None or not self._is_proven:
            return b""
        text = (request.prompt_token_ids, request.output_token_ids, request.cache_salt)
        if text != self._last_text:  # samples share one prompt object, so equality costs nothing
            token_ids = request.prompt_token_ids + request.output_token_ids
            root = root_key(card.model_version, request.cache_salt)
            self._last_keys = join_keys(block_keys(token_ids, card.block_size, root))
            self._last_text = text
        return self._last_keys


def _probe_key(card: ModelCard) -> bytes:
    root = root_key(card.model_version, PROBE_SALT)
    return block_keys(probe_token_ids(card.block_size), card.block_size, root)[-1]


class RequestRouting:
    """Opens a `RoutedCall` for each attempt of a request, and closes it with the pair's first chunk."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._prompt_keys = PromptKeys()
        self._block_size = 1

    def learn(self, card: ModelCard) -> None:
        """Store the card of the served model; keys are computed for it from now on."""
        self._prompt_keys.learn(card)
        self._block_size = card.block_size
        self._metrics.set_refuted(self._prompt_keys.is_refuted)

    def open(self, request: GenerateRequest) -> RoutedCall:
        """Return the call object to pass to Serve instead of the request."""
        is_explained = request.speculation.explain and current_client.get().is_admin  # it shows others' load
        return RoutedCall(request, self._prompt_keys.keys_of(request), is_explained)

    def explained(self, call: RoutedCall, batch: Sequence[TokenChunk]) -> Sequence[TokenChunk]:
        """Add the call's route to each explanation and each trace in `batch`, if the call requested it."""
        if call.route is None:
            return batch
        if call.request.is_traced:
            routed_s = call.route.decision_s
            batch = [
                chunk if chunk.times is None else replace(chunk, times=replace(chunk.times, routed_s=routed_s))
                for chunk in batch
            ]
        if not call.is_explained:
            return batch
        reply = call.route.reply
        reason = f"by load, since the index gave no answer ({call.route.failure})" if reply is None else reply.formula
        return [
            chunk
            if chunk.explanation is None
            else replace(chunk, explanation=replace(chunk.explanation, routes=(reason,)))
            for chunk in batch
        ]

    def accepted(self, call: RoutedCall, first: TokenChunk) -> None:
        """Record a pair's first chunk, which reports how much of the prompt its cache had."""
        if call.route is None:
            return
        self._metrics.record_choice(call.route)
        if call.route.reply is not None:
            self._metrics.record_outcome(call.route.reply, first.num_cached_tokens // self._block_size)

    def refused(self, call: RoutedCall) -> None:
        """Record that the attempt ended before its first chunk, and end its reservation, now or when it is made."""
        call.is_over = True
        if call.withdraw is not None:
            call.withdraw()
        if call.route is not None:
            self._metrics.record_choice(call.route, is_ended=True)

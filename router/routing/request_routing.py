"""Routing in the ingress: a request's block keys before the choice, an audit of the choice afterwards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from protos.block_keys import PROBE_SALT, block_keys, join_keys, probe_token_ids, root_key
from protos.messages import GenerateRequest, ModelCard, TokenChunk
from router.api_keys import current_client
from router.routing.routed_call import RoutedCall, RouteOutcome
from router.routing.router_metrics import RouterMetrics

logger = logging.getLogger(__name__)


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
            batch = [_with_route(chunk, call.route.decision_s) for chunk in batch]
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
            achieved = first.num_cached_tokens // self._block_size
            self._metrics.record_outcome(RouteOutcome(call.route.reply, achieved))

    def refused(self, call: RoutedCall) -> None:
        """Record that the attempt ended before its first chunk, and end its reservation, now or when it is made."""
        call.is_over = True
        if call.withdraw is not None:
            call.withdraw()
        if call.route is not None:
            self._metrics.record_choice(call.route, is_ended=True)


def _with_route(chunk: TokenChunk, routed_s: float) -> TokenChunk:
    return chunk if chunk.times is None else replace(chunk, times=replace(chunk.times, routed_s=routed_s))

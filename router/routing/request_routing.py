"""The ingress's part in routing: it names a request's blocks before the choice, and judges the choice after."""

from __future__ import annotations

from protos.messages import GenerateRequest, ModelCard, TokenChunk
from router.routing.audit import RouteOutcome
from router.routing.index.index_messages import RouteAnswer
from router.routing.prompt_keys import PromptKeys
from router.routing.routed_call import RoutedCall
from router.routing.router_metrics import RouterMetrics


class RequestRouting:
    """Opens a `RoutedCall` for each attempt of a request, and closes it with what the pair said first."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._names = PromptKeys()
        self._block_size = 1

    def learn(self, card: ModelCard) -> None:
        """Take in what is served; blocks are named for this model from now on."""
        self._names.learn(card)
        self._block_size = card.block_size
        self._metrics.set_refuted(self._names.is_refuted)

    def open(self, request: GenerateRequest) -> RoutedCall:
        """What to pass to Serve in the request's place."""
        return RoutedCall(request, self._names.keys_of(request))

    def accepted(self, call: RoutedCall, first: TokenChunk) -> None:
        """A pair has sent its first chunk, which tells what it found in its cache."""
        if call.route is None:
            return
        self._metrics.record_choice(call.route)
        if call.route.answer is not None:
            achieved = first.num_cached_tokens // self._block_size
            self._metrics.record_outcome(_outcome(call.route.answer, achieved))

    def refused(self, call: RoutedCall) -> None:
        """The attempt ended before its first chunk: its work stands nowhere."""
        if call.withdraw is not None:
            call.withdraw()
        if call.route is not None:
            self._metrics.record_choice(call.route)


def _outcome(answer: RouteAnswer, achieved_blocks: int) -> RouteOutcome:
    return RouteOutcome(
        predicted_blocks=answer.predicted_blocks,
        achievable_blocks=answer.achievable_blocks,
        achieved_blocks=achieved_blocks,
        cost_s=answer.cost_s,
        runner_up_cost_s=answer.runner_up_cost_s,
        block_prefill_s=answer.block_prefill_s,
    )

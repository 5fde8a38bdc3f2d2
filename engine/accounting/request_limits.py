"""A request's draft settings, within the limits of the deployment, and the choice of a method that it leaves open."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from engine.config import SpeculationConfig
from engine.sequence.sequence import DraftRule, kind_of
from protos.errors import RequestError
from protos.messages import GenerateRequest, SpeculationMethod, VerifyMode, has_own_weights

logger = logging.getLogger(__name__)


def draft_rule(request: GenerateRequest, deployment: SpeculationConfig, chooser: MethodChooser) -> DraftRule:
    """Return the draft settings of a request; `chooser` chooses its method if it is open.

    K of free drafts is None if the request or the policy sets one K for all drafts. K must not depend on a clock if the
    request has a seed and its verification makes the text depend on K.
    """
    params, method = request.speculation, _method(request, deployment, chooser)
    has_one_length = params.num_tokens is not None or _is_planned(request, deployment)
    return DraftRule(
        num_draft_tokens=_num_draft_tokens(request, deployment),
        verify=params.verify or deployment.verify,
        method=method,
        num_free_draft_tokens=None if has_one_length else deployment.free_draft_limit,
        has_fixed_length=_has_fixed_length(request, deployment),
        num_tree_nodes=_num_tree_nodes(request, deployment, method),
    )


def _method(request: GenerateRequest, deployment: SpeculationConfig, chooser: MethodChooser) -> str:
    """Return the request's method; a choice may depend on a clock only if K may."""
    method = request.speculation.method or deployment.method
    if method != SpeculationMethod.AUTO:
        return method
    if not _is_planned(request, deployment):
        return next(iter(deployment.choices), SpeculationMethod.NONE)
    return chooser.choose(kind_of(is_greedy=request.sampling.is_greedy))


def _num_draft_tokens(request: GenerateRequest, deployment: SpeculationConfig) -> int:
    """Return K of a request, within the deployment's limit."""
    params = request.speculation
    method = params.method or deployment.method
    if not params.enabled or method == SpeculationMethod.NONE:
        return 0
    if params.num_tokens is not None:
        return min(params.num_tokens, deployment.max_num_tokens)
    if _is_planned(request, deployment):
        return deployment.max_num_tokens
    return deployment.free_draft_limit if method == SpeculationMethod.SUFFIX else deployment.num_tokens


def _num_tree_nodes(request: GenerateRequest, deployment: SpeculationConfig, method: str) -> int:
    """Return the largest tree of a request; 0 if its drafts come from the text, or its verification is for chains."""
    verify = request.speculation.verify or deployment.verify
    can_branch = verify is not VerifyMode.BLOCK or request.sampling.is_greedy
    return deployment.tree_nodes if can_branch and has_own_weights(method) else 0


def check_steps(request: GenerateRequest, is_allowed: bool, deployment: SpeculationConfig) -> None:
    """Raise RequestError if a request asks for reasoning steps that this engine cannot draft."""
    if not request.speculation.is_approximate:
        return
    if not is_allowed or _num_draft_tokens(request, deployment) == 0:
        raise RequestError(
            "speculation.mode is 'approximate', but this engine drafts no reasoning steps; leave it out",
            param="speculation.mode",
        )


def _has_fixed_length(request: GenerateRequest, deployment: SpeculationConfig) -> bool:
    verify = request.speculation.verify or deployment.verify
    is_matched = verify is VerifyMode.COUPLED or request.sampling.is_greedy
    return request.is_seeded and not is_matched


def is_adaptive(speculation: SpeculationConfig) -> bool:
    """True if every pass gets its own K, except in requests with a fixed length."""
    return speculation.adaptive and speculation.num_tokens > 0


def _is_planned(request: GenerateRequest, deployment: SpeculationConfig) -> bool:
    return is_adaptive(deployment) and not _has_fixed_length(request, deployment)


EXPLORED = 16  # one request in 16 goes to the method that was used longest ago

Goodput = Callable[[str, str], float | None]  # (method, class) -> goodput; None if not measured


class MethodChooser:
    """Chooses the method of requests that leave it open: a bandit over the methods on offer, per class of requests.

    Its reward is the goodput: tokens per second relative to plain decoding, with the cost of drafting included
    (`engine.accounting.speculation_gate`). A fixed share of the requests explores, since traffic drifts and old
    measurements lose their value. It chooses by counts and times of earlier passes only, never by a token that depends
    on the choice.

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

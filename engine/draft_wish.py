"""What a request wishes of its drafts, within what the deployment allows."""

from __future__ import annotations

from engine.config import SpeculationConfig
from protos.errors import RequestError
from protos.messages import GenerateRequest, SpeculationMethod


def num_draft_tokens(request: GenerateRequest, deployment: SpeculationConfig) -> int:
    """K that a request gets: what it asks for, within what the deployment allows."""
    wish = request.speculation
    if not wish.enabled or (wish.method or deployment.method) is SpeculationMethod.NONE:
        return 0
    if wish.num_tokens is None:
        return deployment.max_num_tokens if is_adaptive(deployment) else deployment.num_tokens
    return min(wish.num_tokens, deployment.max_num_tokens)


def check_steps(request: GenerateRequest, is_allowed: bool, deployment: SpeculationConfig) -> None:
    """Raise RequestError for a request that wants reasoning steps which cannot be had here."""
    if not request.speculation.is_approximate:
        return
    if not is_allowed or num_draft_tokens(request, deployment) == 0:
        raise RequestError(
            "speculation.mode is 'approximate', and this engine drafts no reasoning steps; leave it out",
            param="speculation.mode",
        )


def is_adaptive(speculation: SpeculationConfig) -> bool:
    """Whether every pass gets its own K."""
    return speculation.adaptive and speculation.num_tokens > 0

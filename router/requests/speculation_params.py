"""Speculation settings of a request, checked against the deployment's."""

from __future__ import annotations

from protos.errors import RequestError
from protos.messages import ModelCard, SpeculationMethod, SpeculationMode, SpeculationParams, VerifyMode
from router.requests.generate_params import GenerateParams
from router.requests.generation_fields import SpeculationFields


def speculation_params(wishes: SpeculationFields | None, card: ModelCard) -> SpeculationParams:
    """Return the request's speculation settings.

    Raises:
        RequestError: the deployment drafts fewer tokens, or does not offer the method.
    """
    if wishes is None:
        return SpeculationParams()
    if wishes.num_tokens is not None and 0 < card.max_draft_tokens < wishes.num_tokens:
        raise RequestError(
            f"speculation.num_tokens is {wishes.num_tokens}; this deployment drafts at most {card.max_draft_tokens}.",
            param="speculation.num_tokens",
        )
    is_enabled = True if wishes.enabled is None else wishes.enabled
    return SpeculationParams(
        is_enabled,
        wishes.num_tokens,
        wishes.verify,
        _method(wishes.method, card),
        wishes.mode is SpeculationMode.APPROXIMATE,
        wishes.threshold,
        bool(wishes.explain),
    )


def _method(name: str | None, card: ModelCard) -> str | None:
    offered = card.speculation_methods or (SpeculationMethod.NONE,)
    if name is not None and name not in offered:
        raise RequestError(
            f"speculation.method is {name!r}; this deployment offers {', '.join(offered)}.", param="speculation.method"
        )
    return name


def check_prediction(params: GenerateParams, card: ModelCard) -> None:
    """Raise `RequestError` where a prediction could not be used, or could not be used exactly."""
    fields, wishes = params.fields, params.fields.speculation or SpeculationFields()
    if len(params.prompts) > 1:
        raise RequestError(
            f"prediction is for one prompt, and prompt holds {len(params.prompts)}; send them one by one.",
            param="prediction",
        )
    if wishes.is_off or card.max_draft_tokens == 0:
        where = "this request" if wishes.is_off else "this deployment"
        raise RequestError(
            f"prediction is a draft, and {where} drafts nothing (speculation); leave one of them out.",
            param="prediction",
        )
    temperature = card.sampling_defaults.temperature if fields.temperature is None else fields.temperature
    verify = wishes.verify or card.verify
    if fields.seed is not None and temperature > 0 and verify is not VerifyMode.COUPLED:
        raise RequestError(
            f"prediction and seed together would bias a sampled output under {verify} verification, since the text may "
            "come from that very seed; leave the seed out or set speculation.verify to coupled.",
            param="prediction",
        )


def check_approximate(params: GenerateParams, card: ModelCard, num_choices: int) -> None:
    """Raise `RequestError` if `speculation.mode` is approximate and cannot be, or a threshold comes without it."""
    fields, wishes = params.fields, params.fields.speculation or SpeculationFields()
    if wishes.mode is not SpeculationMode.APPROXIMATE:
        if wishes.threshold is not None:
            raise RequestError(
                f"speculation.threshold is {wishes.threshold:g}, and speculation.mode is not 'approximate'; "
                "leave it out or set the mode.",
                param="speculation.threshold",
            )
        return
    if not card.has_approximate_steps:
        raise RequestError(
            "speculation.mode is 'approximate', which this deployment does not allow; leave it out "
            "(an operator allows it with speculation.steps).",
            param="speculation.mode",
        )
    conflicts = (  # parameters that a text partly written by the draft cannot satisfy
        (fields.seed is not None, f"seed {fields.seed}: the output would not be reproducible"),
        (params.num_logprobs is not None, "logprobs: the target has not sampled every token"),
        (
            params.grammar is not None,
            f"{params.grammar and params.grammar.param}: the draft's steps keep to no grammar",
        ),
        (num_choices > 1, f"{num_choices} choices: it is for one at a time"),
        (fields.prediction is not None, "prediction: both would draft the same text"),
        (wishes.is_off, "speculation that is switched off (enabled, num_tokens or method)"),
    )
    if reason := next((reason for is_so, reason in conflicts if is_so), None):
        raise RequestError(
            f"speculation.mode is 'approximate', which does not go with {reason}; leave one of them out.",
            param="speculation.mode",
        )

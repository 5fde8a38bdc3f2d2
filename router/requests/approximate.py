"""Requests for reasoning steps that are not exact: refused where another parameter promises exactness."""

from __future__ import annotations

from protos.errors import RequestError
from protos.messages import Grammar, ModelCard, SpeculationMode
from router.requests.generation_fields import GenerationFields, SpeculationFields


def check_approximate(
    fields: GenerationFields, card: ModelCard, num_choices: int, *, grammar: Grammar | None, num_logprobs: int | None
) -> None:
    """Raise `RequestError` if `speculation.mode` is approximate and cannot be, or a threshold comes without it."""
    wishes = fields.speculation or SpeculationFields()
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
    if reason := _conflict(fields, wishes, num_choices, grammar, num_logprobs):
        raise RequestError(
            f"speculation.mode is 'approximate', which does not go with {reason}; leave one of them out.",
            param="speculation.mode",
        )


def _conflict(
    fields: GenerationFields,
    wishes: SpeculationFields,
    num_choices: int,
    grammar: Grammar | None,
    num_logprobs: int | None,
) -> str | None:
    """Return the parameter that a text partly written by the draft cannot satisfy."""
    conflicts = (
        (fields.seed is not None, f"seed {fields.seed}: the output would not be reproducible"),
        (num_logprobs is not None, "logprobs: the target has not sampled every token"),
        (grammar is not None, f"{grammar and grammar.param}: the draft's steps keep to no grammar"),
        (num_choices > 1, f"{num_choices} choices: it is for one at a time"),
        (fields.prediction is not None, "prediction: both would draft the same text"),
        (wishes.is_off, "speculation that is switched off (enabled, num_tokens or method)"),
    )
    return next((reason for is_so, reason in conflicts if is_so), None)

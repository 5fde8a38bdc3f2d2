"""Parameters of a request's sampling and speculation: its own fields, and the defaults and limits of the deployment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from protos.errors import RequestError
from protos.messages import (
    Grammar,
    SamplingParams,
    SpeculationMethod,
    SpeculationParams,
    VerifyMode,
)
from protos.served_model import ModelCard
from router.requests.generation_fields import GenerationFields, SpeculationFields
from router.requests.reasoning_format import Thinking
from router.tokenizer import Tokenizer

_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and its text for a client that asks for an echo."""

    token_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """A request with its prompts in tokens and every parameter in its range."""

    request_id: str
    model_id: str  # as the answer names it
    fields: GenerationFields
    prompts: tuple[Prompt, ...]
    max_tokens: int | None
    is_chat: bool = False
    num_logprobs: int | None = None
    has_echo: bool = False
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    tool_schemas: Mapping[str, object] = field(default_factory=dict)  # of tools whose calls the answer may hold
    has_calls_alone: bool = False  # the answer may hold nothing else
    prediction_token_ids: tuple[int, ...] = ()

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likely tokens wanted at each position of the prompt; None if none are wanted."""
        echoed = self.num_logprobs if self.has_echo else None
        return echoed if self.fields.prompt_logprobs is None else max(self.fields.prompt_logprobs, echoed or 0)

    @property
    def num_choices_per_prompt(self) -> int:
        return self.fields.n or 1


Number = TypeVar("Number", int, float)


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
        wishes.mode == "approximate",
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
    """Raise `RequestError` if `speculation.mode` cannot be approximate, or a threshold comes without that mode."""
    fields, wishes = params.fields, params.fields.speculation or SpeculationFields()
    if wishes.mode != "approximate":
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


def check_token_ids(token_ids: Sequence[int], card: ModelCard, name: str) -> None:
    """Raise `RequestError` if the list is empty or an id is not in the vocabulary; `name` is its parameter."""
    if not token_ids:
        raise RequestError(f"{name} is empty; send at least one token.", param=name)
    for worst in (min(token_ids), max(token_ids)):
        if not 0 <= worst < card.vocab_size:
            raise RequestError(
                f"{name} holds token id {worst}; this model's vocabulary is [0, {card.vocab_size}).", param=name
            )


def sampling_params(
    params: GenerateParams, seed: int, card: ModelCard, bad_words: tuple[tuple[int, ...], ...]
) -> SamplingParams:
    """Return the parameters that all prompts of a request share; `max_tokens` is set per prompt."""
    fields, defaults = params.fields, card.sampling_defaults
    return SamplingParams(
        seed=seed,
        temperature=_default(fields.temperature, defaults.temperature),
        top_k=max(_default(fields.top_k, defaults.top_k), 0),
        top_p=max(_default(fields.top_p, defaults.top_p), 1e-9),  # keeps one token, as 0 asks for
        min_p=_default(fields.min_p, defaults.min_p),
        repetition_penalty=_default(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_default(fields.presence_penalty, 0.0),
        frequency_penalty=_default(fields.frequency_penalty, 0.0),
        logit_bias=_logit_bias(fields.logit_bias or {}, card),
        bad_words=bad_words,
        stop_token_ids=_stop_token_ids(fields, card),
        min_tokens=fields.min_tokens or 0,
        num_logprobs=params.num_logprobs,
        grammar=params.grammar,
        num_prompt_logprobs=params.num_prompt_logprobs,
    )


def _default(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _logit_bias(biases: dict[str, float], card: ModelCard) -> tuple[tuple[int, float], ...]:
    parsed = []
    for name, bias in biases.items():
        if not _TOKEN_ID.fullmatch(name):  # so that no id is named twice
            raise RequestError(f"logit_bias has the key {name[:80]!r}; keys are token ids.", param="logit_bias")
        token_id = int(name)
        check_token_ids([token_id], card, "logit_bias")
        parsed.append((token_id, bias))
    return tuple(sorted(parsed))


def bad_word_forms(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return each word as it is tokenized at the start of a text and after a space.

    The most words that a request may send take a second.
    """
    forms: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word):
            forms[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(form for form in forms if form)


def _stop_token_ids(fields: GenerationFields, card: ModelCard) -> tuple[int, ...]:
    stop_token_ids = fields.stop_token_ids or []
    if stop_token_ids:
        check_token_ids(stop_token_ids, card, "stop_token_ids")
    ends = () if fields.ignore_eos else card.eos_token_ids
    return tuple(sorted({*stop_token_ids, *ends}))

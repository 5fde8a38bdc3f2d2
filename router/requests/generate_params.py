"""A validated client request, whatever face it came through, and the sequences it becomes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from protos.errors import ContextLengthError, RequestError
from protos.messages import (
    GenerateRequest,
    Grammar,
    ModelCard,
    SamplingParams,
    SpeculationMethod,
    SpeculationMode,
    SpeculationParams,
    VerifyMode,
)
from router.config import IngressLimits
from router.requests.approximate import check_approximate
from router.requests.generation_fields import GenerationFields, SpeculationFields
from router.tokenizer.tokenizer import Tokenizer

Number = TypeVar("Number", int, float)

_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may fill the context


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and its text where the client may want it back."""

    token_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What both faces make of a request: prompts in tokens, and every parameter in its range."""

    request_id: str
    fields: GenerationFields
    prompts: tuple[Prompt, ...]
    max_tokens: int | None
    is_chat: bool = False
    num_logprobs: int | None = None
    has_echo: bool = False
    grammar: Grammar | None = None
    tool_names: frozenset[str] = frozenset()  # tools whose calls are looked for in the answer
    prediction_token_ids: tuple[int, ...] = ()

    @property
    def num_choices_per_prompt(self) -> int:
        return self.fields.n or 1


def generate_requests(
    params: GenerateParams, card: ModelCard, bad_words: tuple[tuple[int, ...], ...], limits: IngressLimits
) -> list[GenerateRequest]:
    """The sequences of one client request: choice i is sample i mod n of prompt i div n.

    All of them share a seed, drawn here if the client sent none, so that any of them can go on elsewhere with the
    same randomness.

    Raises:
        RequestError: a parameter does not fit the model, or the request asks for too many choices.
    """
    num_choices = len(params.prompts) * params.num_choices_per_prompt
    if num_choices > limits.max_choices:
        raise RequestError(
            f"{len(params.prompts)} prompts with n = {params.num_choices_per_prompt} ask for {num_choices} choices; "
            f"one request may have {limits.max_choices}.",
            param="n",
        )
    if params.fields.prediction is not None:
        _check_prediction(params, card)
    check_approximate(params.fields, card, num_choices, grammar=params.grammar, num_logprobs=params.num_logprobs)
    seed = secrets.randbits(63) if params.fields.seed is None else params.fields.seed
    requests: list[GenerateRequest] = []
    common = _sampling(params, seed, card, bad_words)
    for prompt in params.prompts:
        check_token_ids(prompt.token_ids, card, "prompt")
        sampling = _within_length(common, _max_tokens(params, len(prompt.token_ids), card))
        for sample in range(params.num_choices_per_prompt):
            requests.append(_request(params, prompt, sampling, sample, len(requests), card))
    return requests


def _request(
    params: GenerateParams, prompt: Prompt, sampling: SamplingParams, sample: int, index: int, card: ModelCard
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{params.request_id}-{index}",
        prompt_token_ids=prompt.token_ids,
        sampling=sampling,
        speculation=_speculation(params.fields.speculation, card),
        sample_index=sample,
        priority=params.fields.priority or 0,
        timeout_s=params.fields.timeout_s,
        cache_salt=params.fields.cache_salt or "",
        prediction_token_ids=params.prediction_token_ids[: card.max_model_len],
        session_id=params.fields.prompt_cache_key or params.fields.user or "",
        is_seeded=params.fields.seed is not None,
    )


def _sampling(
    params: GenerateParams, seed: int, card: ModelCard, bad_words: tuple[tuple[int, ...], ...]
) -> SamplingParams:
    """What all prompts of a request have in common."""
    fields, defaults = params.fields, card.sampling_defaults
    return SamplingParams(
        seed=seed,
        temperature=_default(fields.temperature, defaults.temperature),
        top_k=max(_default(fields.top_k, defaults.top_k), 0),
        top_p=_default(fields.top_p, defaults.top_p),
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
        num_prompt_logprobs=params.num_logprobs if params.has_echo else None,
    )


def _within_length(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    if sampling.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}; it must be at most max_tokens, {max_tokens}.", param="min_tokens"
        )
    return replace(sampling, max_tokens=max_tokens)


def _default(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _max_tokens(params: GenerateParams, num_prompt_tokens: int, card: ModelCard) -> int:
    """What is left of the context, or less where the client or the endpoint says so."""
    room = card.max_model_len - num_prompt_tokens
    name = "messages" if params.is_chat else "prompt"
    if room < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {card.max_model_len} tokens. The {name} has {num_prompt_tokens}; "
            f"shorten it to {card.max_model_len - 1} or fewer.",
            param=name,
        )
    if params.max_tokens is None:
        return room if params.is_chat else min(_COMPLETION_MAX_TOKENS, room)
    if params.max_tokens > room:
        raise ContextLengthError(
            f"This model's maximum context length is {card.max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + params.max_tokens} tokens ({num_prompt_tokens} in the {name}, {params.max_tokens} "
            f"in the completion). Shorten the {name} or set max_tokens to {room} or less.",
            param="max_tokens",
        )
    return params.max_tokens


def check_token_ids(token_ids: Sequence[int], card: ModelCard, name: str) -> None:
    """Raises `RequestError` if there are none or one is not in the vocabulary; `name` is the parameter they came in."""
    if not token_ids:
        raise RequestError(f"{name} is empty; send at least one token.", param=name)
    for worst in (min(token_ids), max(token_ids)):
        if not 0 <= worst < card.vocab_size:
            raise RequestError(
                f"{name} holds token id {worst}; this model's vocabulary is [0, {card.vocab_size}).", param=name
            )


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
    """Each word as it is tokenized at the start of a text and after a space; as many as are allowed take a second."""
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


def _speculation(wishes: SpeculationFields | None, card: ModelCard) -> SpeculationParams:
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
    )


def _check_prediction(params: GenerateParams, card: ModelCard) -> None:
    """Raises `RequestError` where a prediction could not be used, or could not be used exactly."""
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
    is_sampled = _default(fields.temperature, card.sampling_defaults.temperature) > 0
    verify = wishes.verify or card.verify
    if fields.seed is not None and is_sampled and verify is not VerifyMode.COUPLED:
        raise RequestError(
            f"prediction and seed together would bias a sampled output under {verify} verification, since the text may "
            "come from that very seed; leave the seed out or set speculation.verify to coupled.",
            param="prediction",
        )


def _method(name: str | None, card: ModelCard) -> SpeculationMethod | None:
    offered = card.speculation_methods or (SpeculationMethod.NONE,)
    if name is not None and name not in offered:
        raise RequestError(
            f"speculation.method is {name!r}; this deployment offers {', '.join(offered)}.", param="speculation.method"
        )
    return None if name is None else SpeculationMethod(name)

"""The sequences that one client request becomes."""

from __future__ import annotations

import secrets
from dataclasses import replace

from protos.errors import ContextLengthError, RequestError
from protos.messages import GenerateRequest, ModelCard, SamplingParams
from router.api_keys import Client, current_client, digest
from router.config import IngressLimits
from router.requests.generate_params import GenerateParams, Prompt
from router.requests.sampling_params import sampling_params
from router.requests.speculation_params import check_approximate, check_prediction, speculation_params
from router.requests.token_ids import check_token_ids

# Logprobs of one prompt, which leave its pair in one message: 15 bytes each, of 64 MiB for a message.
MAX_PROMPT_LOGPROBS = 2_000_000
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may fill the context


def check_num_choices(num_prompts: int, num_per_prompt: int, limits: IngressLimits) -> None:
    """Raise RequestError for too many choices; called before a prompt is tokenized too."""
    num_choices = num_prompts * num_per_prompt
    if num_choices > limits.max_choices:
        raise RequestError(
            f"{num_prompts} prompts with n = {num_per_prompt} ask for {num_choices} choices; "
            f"one request may have {limits.max_choices}.",
            param="n",
        )


def generate_requests(
    params: GenerateParams, card: ModelCard, bad_words: tuple[tuple[int, ...], ...], limits: IngressLimits
) -> list[GenerateRequest]:
    """Return the sequences of one client request: choice i is sample i mod n of prompt i div n.

    All of them share a seed, drawn here if the client sent none, so that any of them can go on elsewhere with the
    same randomness.

    Raises:
        RequestError: a parameter does not fit the model, or the request asks for too many choices.
        RateLimitError: the tenant's rate is used up.
    """
    num_choices = len(params.prompts) * params.num_choices_per_prompt
    check_num_choices(len(params.prompts), params.num_choices_per_prompt, limits)
    if params.fields.prediction is not None:
        check_prediction(params, card)
    check_approximate(params, card, num_choices)
    seed = secrets.randbits(63) if params.fields.seed is None else params.fields.seed
    requests: list[GenerateRequest] = []
    common = sampling_params(params, seed, card, bad_words)
    for whole in params.prompts:
        prompt = _truncated(whole, params, card)
        check_token_ids(prompt.token_ids, card, "prompt")
        _check_prompt_logprobs(len(prompt.token_ids), common.num_prompt_logprobs)
        sampling = _within_length(common, _max_tokens(params, len(prompt.token_ids), card))
        for sample in range(params.num_choices_per_prompt):
            requests.append(_request(params, prompt, sampling, sample, len(requests), card))
    current_client.get().take(_cost(requests))
    return requests


def _check_prompt_logprobs(num_tokens: int, num_logprobs: int | None) -> None:
    num_wanted = 0 if num_logprobs is None else num_tokens * (num_logprobs + 1)
    if num_wanted > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"the logprobs of this prompt are {num_wanted}; at most {MAX_PROMPT_LOGPROBS} are answered. Ask for fewer "
            "of each token, or send a shorter prompt.",
            param="prompt_logprobs",
        )


def _truncated(prompt: Prompt, params: GenerateParams, card: ModelCard) -> Prompt:
    """Return the end of a prompt that the client wants shortened, to a length or (-1) to what leaves room."""
    num_kept = params.fields.truncate_prompt_tokens
    if num_kept is None:
        return prompt
    if num_kept < 0:
        num_kept = max(card.max_model_len - max(params.max_tokens or 1, 1), 1)
    if num_kept == 0 or num_kept >= len(prompt.token_ids):
        return prompt
    return Prompt(prompt.token_ids[-num_kept:])


def _cost(requests: list[GenerateRequest]) -> int:
    """Return the tokens that the requests may read and write, of which a tenant has so many per minute."""
    return sum(len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests)


def _request(
    params: GenerateParams, prompt: Prompt, sampling: SamplingParams, sample: int, index: int, card: ModelCard
) -> GenerateRequest:
    client = current_client.get()
    num_choices = len(params.prompts) * params.num_choices_per_prompt
    return GenerateRequest(
        request_id=f"{params.request_id}-{index}",
        prompt_token_ids=prompt.token_ids,
        sampling=sampling,
        speculation=speculation_params(params.fields.speculation, card),
        sample_index=sample,
        priority=_priority(params.fields.priority, client),
        num_places=num_choices if index == 0 else 1,
        is_admitted=index > 0,
        tenant=client.tenant_id,
        weight=client.weight,
        timeout_s=params.fields.timeout_s,
        cache_salt=client.secret(params.fields.cache_salt or ""),
        prediction_token_ids=params.prediction_token_ids[: card.max_model_len],
        session_id=digest(client.secret(params.fields.prompt_cache_key or params.fields.user or "")),
        is_seeded=params.fields.seed is not None,
        returns_sources=bool(params.fields.return_token_sources),
        returns_guesses=params.fields.has_draft_events,
        model_version=card.model_version,
        is_logged=client.is_logged and params.fields.store is not False,
    )


def _priority(asked: int | None, client: Client) -> int:
    """Return the priority, which may be as low a number as the operator has granted."""
    if asked is None:
        return max(0, client.max_priority or 0)
    if client.max_priority is not None and asked < client.max_priority:
        raise RequestError(
            f"priority is {asked}, and this API key may ask for {client.max_priority} or more (lower is sooner); ask "
            "the operator for max_priority behind the key.",
            param="priority",
        )
    return asked


def _within_length(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    if sampling.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}; it must be at most max_tokens, {max_tokens}.", param="min_tokens"
        )
    return replace(sampling, max_tokens=max_tokens)


def _max_tokens(params: GenerateParams, num_prompt_tokens: int, card: ModelCard) -> int:
    """Return the room left in the context, or fewer where the client or the endpoint sets a limit."""
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

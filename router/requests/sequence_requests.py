"""The sequences that one client request becomes."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Sequence
from dataclasses import replace

from protos.errors import ContextLengthError, RequestError
from protos.messages import GenerateRequest, SamplingParams
from protos.served_model import ModelCard
from router.api_keys import Client, current_client, digest
from router.requests.sampling_params import (
    GenerateParams,
    Prompt,
    check_approximate,
    check_prediction,
    check_token_ids,
    sampling_params,
    speculation_params,
)

# Logprobs of one prompt, which leave its pair in one message: 15 bytes each, of 64 MiB for a message.
MAX_PROMPT_LOGPROBS = 2_000_000
MAX_CHOICES = 128


def check_num_choices(num_prompts: int, num_per_prompt: int) -> None:
    """Raise RequestError for too many choices; called before a prompt is tokenized too."""
    num_choices = num_prompts * num_per_prompt
    if num_choices > MAX_CHOICES:
        raise RequestError(
            f"{num_prompts} prompts with n = {num_per_prompt} ask for {num_choices} choices; "
            f"one request may have {MAX_CHOICES}.",
            param="n",
        )


def generate_requests(
    params: GenerateParams, card: ModelCard, bad_words: tuple[tuple[int, ...], ...], *, is_strict: bool = False
) -> list[GenerateRequest]:
    """Return the sequences of one client request: choice i is sample i mod n of prompt i div n.

    All of them share a seed, drawn here if the client sent none, so that any of them can go on elsewhere with the
    same randomness.

    Raises:
        RequestError: a parameter does not fit the model, or the request asks for too many choices.
        RateLimitError: the tenant's rate is used up.
    """
    num_choices = len(params.prompts) * params.num_choices_per_prompt
    check_num_choices(len(params.prompts), params.num_choices_per_prompt)
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
        sampling = _within_length(common, params, len(prompt.token_ids), card, is_strict=is_strict)
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
    kept = truncated(prompt.token_ids, params.fields.truncate_prompt_tokens, params.max_tokens, card)
    return prompt if len(kept) == len(prompt.token_ids) else Prompt(tuple(kept))


def truncated(token_ids: Sequence[int], num_kept: int | None, max_tokens: int | None, card: ModelCard) -> Sequence[int]:
    """Return the end of a prompt that the client wants shortened, to a length or (-1) to what leaves room."""
    if num_kept is None:
        return token_ids
    if num_kept < 0:
        wanted = max(max_tokens or 1, 1)
        num_kept = card.max_model_len - (wanted if wanted < card.max_model_len else 1)
    return token_ids[-num_kept:] if 0 < num_kept < len(token_ids) else token_ids


def _cost(requests: list[GenerateRequest]) -> int:
    """Return the tokens that the requests may cost, which count against the tenant's tokens per minute."""
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
        returns_drafts=params.fields.has_draft_events,
        model_version=card.model_version,
        is_logged=client.is_logged and _is_logged(params),
    )


def _is_logged(params: GenerateParams) -> bool:
    store = params.fields.store
    return zlib.crc32(params.request_id.encode()) < 0.1 * (1 << 32) if store is None else store


def _priority(asked: int | None, client: Client) -> int:
    """Return the priority, which may be as low a number as the operator has granted."""
    if asked is None:
        return max(0, client.max_priority or 0)
    if client.max_priority is not None and asked < client.max_priority:
        raise RequestError(
            f"priority is {asked}, and this API key may ask for {client.max_priority} or more (lower is sooner); ask "
            "the operator to add max_priority to the key.",
            param="priority",
        )
    return asked


def check_room(num_prompt_tokens: int, card: ModelCard, name: str) -> int:
    """Return the room that a prompt leaves in the context. Raises ContextLengthError for a prompt that fills it."""
    room = card.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError.of_prompt(name, num_prompt_tokens, card.max_model_len)
    return room


def _within_length(
    sampling: SamplingParams, params: GenerateParams, num_prompt_tokens: int, card: ModelCard, *, is_strict: bool
) -> SamplingParams:
    """Return the parameters with the output's limits, which the room left in the context bounds.

    A max_tokens that does not fit is refused with `is_strict`, and otherwise bounded.
    """
    room = check_room(num_prompt_tokens, card, "messages" if params.is_chat else "prompt")
    limit = _token_limit(params)
    if limit is not None and sampling.min_tokens > limit:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}; it must be at most max_tokens, {limit}.", param="min_tokens"
        )
    asked = max(params.max_tokens or 0, sampling.min_tokens)
    if asked > room and is_strict:
        param = "min_tokens" if sampling.min_tokens == asked else "max_tokens"
        raise _no_room(param, num_prompt_tokens, asked, card.max_model_len)
    most = room if limit is None else min(limit, room)
    return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def _token_limit(params: GenerateParams) -> int | None:
    """Return the limit that the client or the endpoint sets; None for what fits, which -1 asks for as in llama.cpp."""
    if params.max_tokens is None:
        return None if params.is_chat else 16  # OpenAI's default for /v1/completions; a chat may fill the context
    return None if params.max_tokens < 0 else params.max_tokens


def _no_room(param: str, num_prompt_tokens: int, num_tokens: int, max_model_len: int) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{num_prompt_tokens + num_tokens} tokens ({num_prompt_tokens} in the prompt, {num_tokens} in the completion). "
        f"Please reduce the length of the prompt, or set {param} to {max_model_len - num_prompt_tokens} or less.",
        param=param,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=max_model_len,
        max_tokens=num_tokens,
    )

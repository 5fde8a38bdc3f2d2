"""Sampling parameters of a request: its own fields, the checkpoint's defaults, and token ids checked or looked up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from protos.errors import RequestError
from protos.messages import ModelCard, SamplingParams
from router.requests.generate_params import GenerateParams
from router.requests.generation_fields import GenerationFields
from router.tokenizer.tokenizer import Tokenizer

Number = TypeVar("Number", int, float)
_SMALLEST_TOP_P = 1e-9  # keeps one token, as 0 asks for
_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")


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
        top_p=max(_default(fields.top_p, defaults.top_p), _SMALLEST_TOP_P),
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

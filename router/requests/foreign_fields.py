"""Fields of other servers that affect the answer: translated where they mean the same, or refused by name.

Any other unknown field is ignored, and the answer names it. Only bodies over HTTP are translated: gRPC has a schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from protos.errors import RequestError

_LENGTH, _STOP = ("max_tokens", "max_output_tokens"), ("stop", "stop_sequences")
# Other names of fields with the same meaning; an endpoint has the first or the second. Values are passed on unchanged
# and checked there.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "regex": ("guided_regex",),  # SGLang
    "ebnf": ("guided_grammar",),
    "grammar": ("guided_grammar",),  # llama.cpp
    "json_schema": ("guided_json",),  # both
    "n_predict": _LENGTH,
    "num_predict": _LENGTH,  # Ollama
    "max_new_tokens": _LENGTH,  # Hugging Face, SGLang
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "max_output_tokens": _LENGTH,
    "max_tokens_to_sample": _LENGTH,  # Anthropic's older API
    "max_gen_len": _LENGTH,  # Llama's
    "min_new_tokens": ("min_tokens",),
    "num_return_sequences": ("n",),
    "random_seed": ("seed",),  # Mistral
    "stop": _STOP,
    "stop_sequences": _STOP,
}
_FORMAT = "send response_format"

# Unsupported fields by what to do instead.
_REMEDIES: Mapping[str, str] = {
    _FORMAT: (
        "response_schema response_json_schema response_mime_type output_schema output_format output_config json_mode "
        "guided_json_object guided_options_request guided_decoding guided_decoding_params structured_output schema "
        "json text"
    ),
    "send guided_grammar": "gbnf lark grammar_string",
    "send guided_choice": "choice choices",
    "send response_format or tools": "structural_tag",
    "put x-guidance into the schema": "guided_whitespace_pattern whitespace_pattern",
    "send its fields in the body itself": "generation_config extra_body options parameters sampling_params",
    "send max_tokens, which counts the answer alone": "max_length",
    "send min_tokens, which counts the answer alone": "min_length",
    "send repetition_penalty, which counts prompt and answer": "repeat_penalty",
    "leave it out": "encoder_repetition_penalty no_repeat_ngram_size guidance_scale cfg_scale",
    "ask for n: there are no beams here": "length_penalty early_stopping num_beams",
    "ask for n": "best_of",
    "send temperature 0": "do_sample",
    "send ignore_eos": "ban_eos_token ignore_eos_token",
    "send bad_words": "bad_words_ids bad_words_token_ids",
    "send logit_bias or bad_words": "banned_tokens",
    "send guided_regex or guided_grammar": "force_words_ids",
    "send logprobs": "n_probs return_logprob",
    "leave it out: temperature comes before top_k, top_p and min_p": "temperature_last",
    "leave it out: top_k, top_p and min_p are applied in this order": "samplers sampler_order",
    "send top_p or min_p": (
        "typical_p typ_p typical tfs_z tfs mirostat mirostat_mode top_a top_n_sigma dry_multiplier xtc_probability "
        "dynatemp_range dynamic_temperature smoothing_factor epsilon_cutoff eta_cutoff penalty_alpha"
    ),
}
# Values that ask for nothing; so do zero and false.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "response_mime_type": ("text/plain",),
    "do_sample": (True,),
    "top_n_sigma": (-1,),
    **dict.fromkeys(("repeat_penalty", "encoder_repetition_penalty", "length_penalty", "num_beams", "best_of"), (1,)),
    **dict.fromkeys(("guidance_scale", "cfg_scale", "typical_p", "typ_p", "typical", "tfs_z", "tfs"), (1,)),
}
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    name: (_NEUTRAL.get(name, ()), remedy) for remedy, names in _REMEDIES.items() for name in names.split()
}
# Fields of a chat that affect the answer, for the endpoints that lack them.
_ANSWER_FIELDS = frozenset(
    (
        *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        *("allowed_token_ids", "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words"),
        *("logprobs", "top_logprobs", "prediction", "truncate_prompt_tokens"),
    )
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def known_fields(raw: bytes | bytearray, schema: type[BaseModel], unknown: Sequence[str]) -> dict[str, Any] | None:
    """Return the body with `unknown` names translated to fields of `schema`; None if no name can be.

    The other names may be ignored.

    Raises:
        RequestError: one of them asks for something unsupported, or supported under another name only.
    """
    spelled = {name: _HUMP.sub("_", name).replace("-", "_").lower() for name in unknown}
    known = {*ALIASES, *REFUSED, *_ANSWER_FIELDS, *schema.model_fields, "format"}
    names = [name for name in unknown if spelled[name] in known]
    if not names or "temperature" not in schema.model_fields:  # of a body that generates nothing
        return None
    body: dict[str, Any] = from_json(bytes(raw))
    for name in names:
        value = body[name]
        if value is None or value in ("", [], {}):
            continue
        if name == "format" and "response_format" in schema.model_fields:
            _read_ollama_format(body, value)
        elif name == spelled[name] and (own := _own_name(name, schema)) is not None:
            _rename(body, name, own)
        else:
            _refuse(name, spelled[name], value, schema)
    return body


def _own_name(alias: str, schema: type[BaseModel]) -> str | None:
    return next((name for name in ALIASES.get(alias, ()) if name in schema.model_fields), None)


def _rename(body: dict[str, Any], name: str, own: str) -> None:
    value = body.pop(name)
    value = [value] if own in _STOP and isinstance(value, str) else value
    if body.get(own) is not None and body[own] != value:
        raise RequestError(f"{name} and {own} mean the same, and differ; send {own} alone.", param=name)
    body[own] = value


def _read_ollama_format(body: dict[str, Any], value: object) -> None:
    """Read "json", or a schema."""
    if value != "json" and not isinstance(value, dict):
        raise RequestError(f"format is {str(value)[:80]!r}; send response_format.", param="format")
    del body["format"]
    if body.get("response_format") is not None:
        raise RequestError("format and response_format both constrain the output; send one of them.", param="format")
    body["response_format"] = {"type": "json_object"} | ({"schema": value} if isinstance(value, dict) else {})


def _refuse(name: str, spelled: str, value: object, schema: type[BaseModel]) -> None:
    if spelled in REFUSED:
        neutral, remedy = REFUSED[spelled]
        if value in neutral or (not value and spelled != "do_sample"):
            return
        if remedy == _FORMAT and "response_format" not in schema.model_fields:
            remedy = "send text.format" if "text" in schema.model_fields else "send output_config.format"
        raise RequestError(f"{name} is not served here, and would change the answer; {remedy}.", param=name)
    own = spelled if spelled in schema.model_fields else _own_name(spelled, schema)
    if own is not None:
        raise RequestError(f"{name} is not known here; {own} is.", param=name)
    raise RequestError(
        f"{name} is a field of /v1/chat/completions that this endpoint does not read, and it would change the answer; "
        "leave it out, or send the request there.",
        param=name,
    )

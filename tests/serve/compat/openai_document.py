"""OpenAI's document of the endpoints that are served here, printed as JSON, from the types of OpenAI's Python SDK.

The SDK is generated from that document without its bounds of numbers, so they are listed here. `model` is the served
model, and answers are kept short.
"""

from __future__ import annotations

import json
import os
from typing import Any

from openai.types import Completion, Model, completion_create_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import Response, response_create_params
from openai.types.shared import ErrorObject
from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

RESPONSES = "/v1/responses"
# Refused by name (docs/requests.md): an answer to little else would come of a body that has them.
REFUSED = {"audio", "function_call", "functions", "modalities", "moderation", "suffix", "web_search_options"}
STATE = (RESPONSES, "prompt")  # which is a reference there
JSON, EVENTS = "application/json", "text/event-stream"
BIAS = {"type": "integer", "minimum": -100, "maximum": 100}
FEW = {"type": "integer", "minimum": 1, "maximum": 2}
FEW_TOKENS = {"type": "integer", "minimum": 1, "maximum": 16}
TEXT = {"type": "string", "minLength": 1}
BOUNDS: dict[str, dict[str, Any]] = {
    "model": {"const": os.environ["OUTRIDER_MODEL"]},
    "stream": {"type": ["boolean", "null"]},
    "max_tokens": FEW_TOKENS,
    "max_completion_tokens": FEW_TOKENS,
    "max_output_tokens": FEW_TOKENS,
    "n": FEW,
    "best_of": FEW,
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "presence_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,3}$"},
        "additionalProperties": BIAS,
    },
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    "stop": {"anyOf": [{"type": "null"}, TEXT, {"type": "array", "items": TEXT, "maxItems": 4}]},
    "prompt": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}]},
}


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, params, answer, required in (
        ("/v1/chat/completions", chat_params.CompletionCreateParamsNonStreaming, ChatCompletion, {"max_tokens"}),
        ("/v1/completions", completion_create_params.CompletionCreateParamsNonStreaming, Completion, {"max_tokens"}),
        (RESPONSES, response_create_params.ResponseCreateParamsNonStreaming, Response, {"input", "max_output_tokens"}),
    ):
        body = _schema(params, path, schemas)
        fields = body["properties"] = {name: each for name, each in body["properties"].items() if name not in REFUSED}
        fields |= {name: bound for name, bound in BOUNDS.items() if name in fields and (path, name) != STATE}
        if path == "/v1/chat/completions":
            fields["messages"]["minItems"] = 1
        body["required"] = sorted({*body.get("required", ()), *required, "model"})
        operation = {"requestBody": {"required": True, "content": {JSON: {"schema": body}}}}
        paths[path] = {"post": operation | _answers(answer, path, schemas, is_streamed=True)}
    listed = create_model("Models", __config__=ConfigDict(extra="allow"), object=(str, ...), data=(list[Model], ...))
    paths["/v1/models"] = {"get": _answers(listed, "models", schemas)}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"] = {"get": {"parameters": [name], **_answers(Model, "model", schemas)}}
    info = {"title": "OpenAI", "version": "of the SDK"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _answers(answer: type[BaseModel], path: str, schemas: dict[str, Any], *, is_streamed: bool = False) -> Any:
    failure = create_model("Failure", error=(ErrorObject, ...))
    content = {JSON: {"schema": _schema(answer, f"{path}.answer", schemas)}}
    if is_streamed:
        content[EVENTS] = {}
    refusal = {"description": "", "content": {JSON: {"schema": _schema(failure, "failure", schemas)}}}
    return {"responses": {"200": {"description": "", "content": content}, "4XX": refusal}}


def _schema(kind: Any, prefix: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a type's schema, and add the schemas that it refers to, under names of their own."""
    prefix = prefix.strip("/").replace("/", ".")
    schema = TypeAdapter(kind).json_schema(ref_template=f"#/components/schemas/{prefix}.{{model}}")
    schemas |= {f"{prefix}.{name}": each for name, each in schema.pop("$defs", {}).items()}
    return schema


if __name__ == "__main__":
    print(json.dumps(document()))

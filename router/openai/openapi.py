"""The OpenAPI document: each endpoint with the schema that reads its requests and the types that write its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NotRequired

from openai.types import Model
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from pydantic import BaseModel, TypeAdapter
from typing_extensions import TypedDict

from router.openai.chat_writer import Chat, ChatChunk, TextCompletion
from router.openai.draft_admin import DraftsAnswer, KilledDrafts, NoFields, RunningDraft, SwapDrafts, TryDrafts
from router.openai.errors import ErrorAnswer, MessagesError
from router.openai.messages_request import MessagesRequest
from router.openai.responses_request import ResponsesRequest
from router.requests.chat_request import ChatCompletionRequest
from router.requests.completion_request import CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.requests.generation_fields import NOT_SERVED

_REF = "#/components/schemas/{model}"
_STRICT = ("SpeculationFields", "StructuredOutputs")  # a wrong name in these is refused everywhere
_JSON = "application/json"
_EVENTS = "text/event-stream"
_TURN = {"role": "user", "content": "Say hello."}


class ServedModel(Model):
    """An entry of `/v1/models`."""

    max_model_len: int
    root: str
    parent: str | None = None
    permission: list[dict[str, Any]]


class ModelList(TypedDict):
    """The answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ServedModel]


class TokenizeAnswer(TypedDict):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str | None]]  # null for an id without a token


class DetokenizeAnswer(TypedDict):
    """The answer of `/detokenize`."""

    prompt: str


class HealthAnswer(TypedDict):
    """The answer of the probes; `alarms` are the pair's, if any, `draft` is a draft that can be exchanged."""

    status: Literal["ok"]
    alarms: NotRequired[list[str]]
    draft: NotRequired[RunningDraft]


class InputTokens(TypedDict):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class ThinkingBlock(TypedDict):
    """A block of an answer's thoughts; nothing here signs them."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class TextBlock(TypedDict):
    """A block of text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(TypedDict):
    """Token counts in Anthropic's form: `input_tokens` excludes cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class ResponseBody(Response):
    """The answer of `/v1/responses`: OpenAI's, with the items that are written here."""

    output: list[ResponseOutputMessage | ResponseReasoningItem | ResponseFunctionToolCall]  # type: ignore[assignment]
    tools: list[dict[str, Any]]  # type: ignore[assignment]
    tool_choice: Any
    instructions: str | None = None
    prompt: None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """An endpoint; `event` is the type of a stream's events, and `example` a body that works with any model."""

    summary: str
    answer: Any = str
    body: type[BaseModel] | None = None
    event: Any = None
    error: Any = ErrorAnswer
    example: dict[str, Any] = field(default_factory=dict)


OPERATIONS: Mapping[str, Operation] = {
    "/v1/completions": Operation(
        "Continue prompts",
        TextCompletion,
        CompletionRequest,
        TextCompletion,
        example={"prompt": "Once upon a time", "max_tokens": 16, "seed": 7},
    ),
    "/v1/chat/completions": Operation(
        "Answer a chat", Chat, ChatCompletionRequest, ChatChunk, example={"messages": [_TURN], "max_tokens": 16}
    ),
    "/v1/responses": Operation(
        "Answer a turn of OpenAI's Responses API",
        ResponseBody,
        ResponsesRequest,
        str,
        example={"input": "Say hello.", "max_output_tokens": 16},
    ),
    "/v1/messages": Operation(
        "Answer a turn of Anthropic's Messages API",
        Message,
        MessagesRequest,
        str,
        MessagesError,
        {"messages": [_TURN], "max_tokens": 16},
    ),
    "/v1/messages/count_tokens": Operation(
        "Count the tokens of a turn's prompt",
        InputTokens,
        MessagesRequest,
        error=MessagesError,
        example={"messages": [_TURN]},
    ),
    "/tokenize": Operation(
        "Turn a text or a chat into token ids", TokenizeAnswer, TokenizeRequest, example={"prompt": "Hello"}
    ),
    "/detokenize": Operation(
        "Turn token ids into text", DetokenizeAnswer, DetokenizeRequest, example={"tokens": [1, 2]}
    ),
    "/admin/drafts/kill": Operation("Kill the draft processes; the text goes on", KilledDrafts, NoFields),
    "/admin/drafts/swap": Operation(
        "Have every pair run another draft; the text goes on",
        DraftsAnswer,
        SwapDrafts,
        example={"path": "/models/draft"},
    ),
    "/admin/drafts/canary": Operation(
        "Have every pair try another draft against its own; the text goes on",
        DraftsAnswer,
        TryDrafts,
        example={"path": "/models/draft"},
    ),
    "/admin/drafts/canary/stop": Operation("End all trials of drafts", DraftsAnswer, NoFields),
    "/admin/drafts": Operation("List the draft of every pair", DraftsAnswer),
    "/v1/models": Operation("List the model that is served", ModelList),
    "/v1/models/{model_id}": Operation("Describe the model that is served", ServedModel),
    "/live": Operation("Report whether this process answers", HealthAnswer),
    "/ready": Operation("Report whether a pair answers", HealthAnswer),
    "/health": Operation("Report whether a pair answers", HealthAnswer),
    "/metrics": Operation("Metrics of all replicas, in Prometheus's text format"),
}


@cache
def openapi_document(*, is_strict: bool) -> dict[str, Any]:
    """Return the document; with `is_strict` (`ingress.strict_fields`) bodies must not have unknown fields."""
    schemas, definitions = _schemas(OPERATIONS.values())
    if not is_strict:
        _allow_unknown_fields(definitions)
    _narrow_unsupported(definitions)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": "1",  # of the paths, which keep it
            "description": "Exact speculative decoding with OpenAI's API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"key": []}],
        "paths": {path: _path(path, each, schemas) for path, each in OPERATIONS.items()},
        "components": {"schemas": definitions, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _schemas(operations: Iterable[Operation]) -> tuple[dict[tuple[Any, str], Any], dict[str, Any]]:
    """Return the schema of each type, by type and mode, and the definitions that they refer to."""
    wanted: dict[tuple[Any, str], Any] = {}
    for each in operations:
        for kind in (each.answer, each.event, each.error):
            if kind is not None:
                wanted[kind, "serialization"] = TypeAdapter(kind)
        if each.body is not None:
            wanted[each.body, "validation"] = TypeAdapter(each.body)
    inputs: Any = [(kind, mode, adapter) for (kind, mode), adapter in wanted.items()]
    schemas, rest = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    return dict(schemas), rest.get("$defs", {})


def _allow_unknown_fields(definitions: dict[str, Any]) -> None:
    """Allow unknown fields in bodies: the server ignores them and names them in a header."""
    for name, schema in definitions.items():
        if name not in _STRICT and schema.get("additionalProperties") is False:
            del schema["additionalProperties"]


def _narrow_unsupported(definitions: dict[str, Any]) -> None:
    """Limit unsupported parameters to the values that ask for nothing."""
    for name in (CompletionRequest.__name__, ChatCompletionRequest.__name__):
        properties = definitions[name]["properties"]
        for refused in NOT_SERVED.keys() & properties.keys():
            properties[refused] = {"enum": [None, *NOT_SERVED[refused]]}


def _path(path: str, operation: Operation, schemas: Mapping[tuple[Any, str], Any]) -> dict[str, Any]:
    name = path.strip("/").replace("/", "_").replace("{", "").replace("}", "")
    content_type = "text/plain" if operation.answer is str else _JSON
    content: dict[str, Any] = {content_type: {"schema": schemas[operation.answer, "serialization"]}}
    if operation.event is not None:
        content[_EVENTS] = {"schema": schemas[operation.event, "serialization"]}
    error = {"content": {_JSON: {"schema": schemas[operation.error, "serialization"]}}}
    entry: dict[str, Any] = {
        "operationId": name,
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "4XX": {"description": "A fault of the request", **error},
            "5XX": {"description": "A fault of the server, or too much load", **error},
        },
    }
    if "{model_id}" in path:
        entry["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is None:
        return {"get": entry}
    body = {"schema": schemas[operation.body, "validation"], "example": operation.example}
    return {"post": {**entry, "requestBody": {"required": True, "content": {_JSON: body}}}}

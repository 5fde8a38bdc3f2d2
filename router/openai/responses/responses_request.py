"""The body of `/v1/responses`, and the chat that it is."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema, model_validator

from protos.errors import RequestError
from router.requests.body import Body
from router.requests.foreign_turn import ForeignTurn, text_of
from router.requests.generation_fields import Seed, SpeculationFields, Text, TokenLimit

_TEXT = ("input_text", "output_text", "text", "refusal")
_KEPT = ("previous_response_id", "conversation", "background", "prompt")

_INPUT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}


class ResponsesRequest(Body):
    """The body, as OpenAI's clients send it; `seed`, `cache_salt` and `speculation` are ours.

    `store` may ask for anything: no response is kept, and each says so. False also keeps its tokens out of the log that
    drafts are tuned on.
    """

    model: str | None = None
    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: Text | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    truncation: str | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    seed: Seed | None = None
    cache_salt: str | None = None
    speculation: SpeculationFields | None = None

    @model_validator(mode="after")
    def _refuse_what_is_kept_elsewhere(self) -> ResponsesRequest:
        for name in _KEPT:
            if getattr(self, name):
                raise RequestError(
                    f"{name} refers to state, and this server keeps none between requests; send the whole "
                    "conversation as input.",
                    param=name,
                )
        return self

    def to_chat(self) -> ForeignTurn:
        """Return the turn as a chat. Raises `RequestError`."""
        tools = list(enumerate(self.tools or []))
        own = [_function(tool) for _, tool in tools if tool.get("type") == "function"]
        chat = {
            "model": self.model,
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": own or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls if own else None,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "response_format": self._format(),
            "user": self.user,
            "prompt_cache_key": self.prompt_cache_key,
            "seed": self.seed,
            "cache_salt": self.cache_salt,
            "speculation": self.speculation and self.speculation.model_dump(exclude_unset=True),
            "store": self.store,
        }
        return ForeignTurn(chat, [f"tools.{rank}" for rank, tool in tools if tool.get("type") != "function"])

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not isinstance(self.input, list) or not self.input:
            raise RequestError("input must be a text or a list of items.", param="input")
        for rank, item in enumerate(self.input):
            _add_item(messages, item, f"input[{rank}]")
        return messages

    def _format(self) -> dict[str, Any] | None:
        match (self.text or {}).get("format"):
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return {"type": "json_object"}
            case {"type": "json_schema", **schema}:
                named = {name: schema[name] for name in ("name", "description", "schema", "strict") if name in schema}
                return {"type": "json_schema", "json_schema": named}
        raise RequestError("text.format must be of type text, json_object or json_schema.", param="text.format")


def _add_item(messages: list[dict[str, Any]], item: Any, name: str) -> None:
    """Add an item to the chat: thoughts, text and calls that follow one another are one message of the assistant."""
    match item:
        case {"type": "function_call", "name": str(function), "call_id": str(call_id)}:
            arguments = {"name": function, "arguments": item.get("arguments") or "{}"}
            call = {"id": call_id, "type": "function", "function": arguments}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            content = text_of(output, _TEXT, name)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case {"type": "reasoning"}:
            parts = item.get("content") or item.get("summary") or []
            thoughts = text_of(parts, ("reasoning_text", "summary_text"), name)
            if thoughts:
                messages.append({"role": "assistant", "reasoning": thoughts})
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            text = text_of(content, _TEXT, name)
            is_open = role == "assistant" and bool(messages) and set(messages[-1]) == {"role", "reasoning"}
            if is_open:
                messages[-1]["content"] = text
            else:
                messages.append({"role": role, "content": text})
        case _:
            kind = item.get("type") if isinstance(item, dict) else type(item).__name__
            raise RequestError(
                f"{name} is of type {kind!r}; this server reads messages, reasoning, function_call and "
                "function_call_output, and keeps no items to refer to.",
                param="input",
            )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: object) -> object:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": list(tools), **rest}:
            named = [_choice(tool) for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": rest.get("mode", "auto"), "tools": named}}
    return choice

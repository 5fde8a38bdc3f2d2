"""The body of `/v1/responses`, and the chat that it is."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema, model_validator

from protos.errors import RequestError
from router.requests.body import Body
from router.requests.foreign_turn import ForeignChat, ForeignTurn
from router.requests.generation_fields import Seed, SpeculationFields, Text, TokenLimit
from router.tokenizer.content_parts import text_in

_KEPT = ("previous_response_id", "conversation", "background", "prompt")

_INPUT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}


class ResponsesRequest(Body):
    """The body, as OpenAI's clients send it; `seed`, `cache_salt`, `receipt` and `speculation` are ours.

    `store` is accepted, but no response is stored, and each response reports that. False also keeps its tokens out of
    the log that drafts are tuned on.
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
    receipt: bool | None = None
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
        fields = {
            "model": self.model,
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
            "receipt": self.receipt,
            "speculation": self.speculation and self.speculation.model_dump(exclude_unset=True),
            "store": self.store,
        }
        foreign = [f"tools.{rank}" for rank, tool in tools if tool.get("type") != "function"]
        return ForeignTurn(fields, self._conversation(), foreign)

    def _conversation(self) -> ForeignChat:
        chat = ForeignChat()
        if self.instructions:
            chat.add("instructions", {"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            chat.add("input", {"role": "user", "content": self.input})
            return chat
        if not isinstance(self.input, list) or not self.input:
            raise RequestError("input must be a text or a list of items.", param="input")
        for rank, item in enumerate(self.input):
            _add_item(chat, item, f"input[{rank}]")
        if not chat.messages:
            raise RequestError("input holds no item that has a text; send a message.", param="input")
        return chat

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


def _add_item(chat: ForeignChat, item: Any, name: str) -> None:
    """Add an item to the chat: thoughts, text and calls that follow one another are one message of the assistant."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and isinstance(item.get("role"), str):
        _add_message(chat, item, name)
    elif kind == "reasoning":
        thoughts = _thoughts(item.get("content") or item.get("summary"))
        if thoughts:
            chat.add(name, {"role": "assistant", "reasoning": thoughts})
    elif isinstance(kind, str) and kind.endswith("_call_output"):
        content = item.get("output")
        chat.add(name, {"role": "tool", "tool_call_id": _call_id(item), "content": "" if content is None else content})
    elif isinstance(kind, str) and (kind == "function_call" or (kind.endswith("_call") and "call_id" in item)):
        chat.open_answer(name).setdefault("tool_calls", []).append(_call(item, kind))
    elif not isinstance(kind, str) or kind in ("message", "item_reference"):
        raise RequestError(
            f"{name} is of type {kind or type(item).__name__!r}; this server reads messages, reasoning, calls and "
            "their outputs, and keeps no items to refer to.",
            param="input",
        )
    elif text := text_in(item):  # something that OpenAI's servers did
        chat.add(name, {"role": "assistant", "content": text})
    else:
        chat.left_out.append(name)


def _add_message(chat: ForeignChat, item: dict[str, Any], name: str) -> None:
    is_open = item["role"] == "assistant" and bool(chat.messages) and set(chat.messages[-1]) == {"role", "reasoning"}
    if is_open:
        chat.messages[-1]["content"] = item.get("content")
    else:
        chat.add(name, {"role": item["role"], "content": item.get("content")})


def _thoughts(parts: Any) -> str:
    """Return the text of a reasoning item's parts; other values have no text."""
    texts = [
        part.get("text") if isinstance(part, dict) else part for part in (parts if isinstance(parts, list) else [parts])
    ]
    return "".join(text for text in texts if isinstance(text, str))


def _call_id(item: dict[str, Any]) -> str | None:
    id_ = item.get("call_id") or item.get("id")
    return None if id_ is None else str(id_)


def _call(item: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a call as chats have it: of a function, of a custom tool with its input, or of a tool with its action."""
    if kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments")
    elif kind == "custom_tool_call":
        name, arguments = item.get("name"), {"input": item.get("input")}
    else:
        name = kind.removesuffix("_call")
        arguments = {key: item[key] for key in item if key not in ("type", "id", "call_id", "status")}
    return {"id": _call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}


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

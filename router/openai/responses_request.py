"""The body of `/v1/responses`, its translation to a chat, and the answer."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema, model_validator

from protos.errors import RequestError, ServingError
from protos.messages import FinishReason
from router.generation.delta import Delta
from router.generation.generation import Generation
from router.openai.response_writer import NamedEventWriter
from router.openai.usage import chat_logprobs
from router.requests.chat_request import ForeignChat, ForeignFields
from router.requests.generation_fields import MAX_LOGPROBS, Int, Text, TokenLimit
from router.tokenizer import Tokenizer
from router.tokenizer.content_parts import text_in

_LOGPROBS = "message.output_text.logprobs"  # of `include`
_KEPT = ("previous_response_id", "conversation", "background", "prompt")

_INPUT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}


class ResponsesRequest(ForeignFields):
    """The body, as OpenAI's clients send it.

    `store` is accepted, but no response is stored, and each response reports that. False also keeps its tokens out of
    the log that drafts are tuned on.
    """

    chat_names: ClassVar = {
        r"messages": "input",
        r"max_tokens": "max_output_tokens",
        r"response_format(\.json_schema)?": "text.format",
        r"reasoning_effort": "reasoning.effort",
        r"tools\.(\d+)\.function": r"tools.\1",
    }

    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
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
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None

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

    def to_chat(self) -> ForeignChat:
        """Return the turn as a chat. Raises `RequestError`."""
        tools = list(enumerate(self.tools or []))
        own = [_function(tool) for _, tool in tools if tool.get("type") == "function"]
        fields = {
            **self.shared(),
            "max_tokens": self.max_output_tokens,
            "logprobs": bool(self.top_logprobs) or _LOGPROBS in (self.include or ()) or None,
            "top_logprobs": self.top_logprobs or None,
            "tools": own or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls if own else None,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "response_format": self._format(),
            "user": self.user,
            "prompt_cache_key": self.prompt_cache_key,
        }
        foreign = [f"tools.{rank}" for rank, tool in tools if tool.get("type") != "function"]
        return replace(self._conversation(), fields=fields, foreign_tools=foreign)

    def _conversation(self) -> ForeignChat:
        chat = ForeignChat(left_out=["truncation"] if self.truncation == "auto" else [])
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


class ResponsesWriter(NamedEventWriter):
    """Items follow one another, and the last is open while it grows."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, body: ResponsesRequest) -> None:
        super().__init__(generation, tokenizer)
        self._body = body
        self._key = generation.id.rpartition("-")[2]
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._num_events = 0
        self._reason: FinishReason | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not been sent

    def full(self, gained: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        for delta in gained[0]:
            deque(self.chunks(delta), maxlen=0)  # items grow as in a stream
        deque(self._close(), maxlen=0)
        return self._response(self._status)

    def _begin(self, delta: Delta) -> Iterable[dict[str, Any]]:
        if self._num_events == 0:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))

    def _chunks(self, piece: Delta) -> Iterable[dict[str, Any]]:
        if piece.reasoning or piece.tool_calls:  # their tokens are no text
            self._logprobs.clear()
        else:
            logprobs = chat_logprobs(piece, self._tokenizer) or []
            self._logprobs += [each.model_dump() for each in logprobs[piece.num_reasoning_tokens :]]
        if piece.reasoning:
            yield from self._gain_part("reasoning", piece.reasoning)
        if piece.text:
            yield from self._gain_part("message", piece.text)
        for call in piece.tool_calls:
            if call.id is not None:
                yield from self._close()
                item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
                yield from self._open("fc", item)
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                yield self._item_event("response.function_call_arguments.delta", delta=call.arguments)
        self._reason = piece.finish_reason

    def last_chunks(self) -> Iterable[dict[str, Any]]:
        yield from self._close()
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def error_event(self, error: ServingError) -> bytes:
        failed = {**self._response("failed"), "error": {"code": "server_error", "message": error.message}}
        return self.event(self._event("response.failed", response=failed))

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def _gain_part(self, kind: str, text: str) -> Iterable[dict[str, Any]]:
        """Add text to the open item, opening a new one if another kind is open."""
        is_message = kind == "message"
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close()
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item: dict[str, Any] = {"type": kind, "summary": [], "content": []}
            if is_message:
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"type": kind, "role": "assistant", "content": []}
            yield from self._open("msg" if is_message else "rs", item)
            self._items[-1]["content"].append(part)
            yield self._part_event("response.content_part.added", part=dict(part))
        self._items[-1]["content"][0]["text"] += text
        logprobs = {"logprobs": self._take_logprobs()} if is_message else {}
        yield self._part_event(f"response.{_part_name(kind)}.delta", delta=text, **logprobs)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """Move the logprobs that wait to the open text, and return them."""
        taken, self._logprobs = self._logprobs, []
        self._items[-1]["content"][0]["logprobs"] += taken
        return taken

    def _open(self, prefix: str, item: dict[str, Any]) -> Iterable[dict[str, Any]]:
        self._items.append({"id": f"{prefix}_{self._key}_{len(self._items)}", **item, "status": "in_progress"})
        self._is_open = True
        yield self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=_copied(self._items[-1])
        )

    def _close(self) -> Iterable[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = "completed" if self._reason is not FinishReason.LENGTH else "incomplete"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            [part] = item["content"]
            logprobs: dict[str, Any] = {}
            if item["type"] == "message":
                self._take_logprobs()
                logprobs = {"logprobs": part["logprobs"]}
            yield self._part_event(f"response.{_part_name(item['type'])}.done", text=part["text"], **logprobs)
            yield self._part_event("response.content_part.done", part=dict(part))
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=_copied(item))

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        is_ended = status in ("completed", "incomplete")
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": self._generation.created_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._generation.model_id,
            "output": [_copied(item) for item in self._items] if is_ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_ended else None,
            "user": body.user,
            "metadata": {name: _as_text(value) for name, value in (body.metadata or {}).items()},
            **self._mark(),
            **(self._signed() if is_ended else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part_name(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is now; its parts go on growing."""
    content = {"content": [dict(part) for part in item["content"]]} if "content" in item else {}
    return {**item, **content}


def _as_text(value: object) -> str:
    """Return a value of `metadata` as OpenAI's type has it."""
    return value if isinstance(value, str) else json.dumps(value)

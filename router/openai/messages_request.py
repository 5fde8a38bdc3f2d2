"""The body of `/v1/messages` and `/v1/messages/count_tokens`, its translation to a chat, and the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar

from pydantic import Field

from protos.errors import RequestError, ServingError
from protos.messages import FinishReason
from router.generation.delta import Delta
from router.openai.errors import anthropic_error_object
from router.openai.response_writer import NamedEventWriter
from router.requests.chat_request import ForeignChat, ForeignFields
from router.requests.generation_fields import Int, TokenLimit
from router.tokenizer.content_parts import kind_of, plain_content, text_in

_SERVER_KINDS = ("_use", "_result")  # of blocks about what Anthropic's servers did
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class MessagesRequest(ForeignFields):
    """The body, as Anthropic's clients send it."""

    chat_names: ClassVar = {
        r"stop": "stop_sequences",
        r"response_format(\.json_schema)?": "output_config.format",
        r"reasoning_effort": "output_config.effort",
        r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
        r"tools\.(\d+)\.function": r"tools.\1",
        r"user": "metadata.user_id",
    }

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: TokenLimit | None = None
    system: Any = None
    top_k: Int | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    cache_control: Any = None
    service_tier: str | None = None

    def to_chat(self) -> ForeignChat:
        """Return the turn as a chat; an assistant's message at its end is continued. Raises `RequestError`."""
        tools = list(enumerate(self.tools or []))
        own = [_function(tool, rank) for rank, tool in tools if tool.get("type") in (None, "custom")]
        foreign = [f"tools.{rank}" for rank, tool in tools if tool.get("type") not in (None, "custom")]
        conversation = self._conversation()
        is_prefill = _is_begun(conversation.messages[-1])
        choice = self.tool_choice or {}
        fields = {
            **self.shared(),
            "max_tokens": self.max_tokens,
            "continue_final_message": is_prefill or None,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "tools": own or None,
            "tool_choice": _choice(choice) if choice else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "chat_template_kwargs": self._thinking(),
            "response_format": self._format(),
            "reasoning_effort": (self.output_config or {}).get("effort"),
            "user": (self.metadata or {}).get("user_id"),
        }
        return replace(conversation, fields=fields, foreign_tools=foreign)

    def _conversation(self) -> ForeignChat:
        chat = ForeignChat()
        if plain_content(self.system)[0]:
            chat.add("system", {"role": "system", "content": self.system})
        for rank, message in enumerate(self.messages):
            _add_message(chat, message, f"messages.{rank}")
        if chat.messages and _is_blank(chat.messages[-1]):  # the answer, not yet begun
            chat.messages.pop()
            chat.names.pop()
        if not chat.messages:
            raise RequestError("messages have no content; send a text at least.", param="messages")
        return chat

    def _thinking(self) -> dict[str, Any] | None:
        if self.thinking is None:
            return None
        kind = self.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise RequestError(f"thinking is {kind!r}; it must be enabled, disabled or adaptive.", param="thinking")
        return {"enable_thinking": kind != "disabled"}

    def _format(self) -> dict[str, Any] | None:
        match (self.output_config or {}).get("format"):
            case None:
                return None
            case {"type": "json_schema", "schema": schema}:
                return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
        raise RequestError(
            "output_config.format must have the type 'json_schema' and a 'schema'.", param="output_config.format"
        )


def _is_blank(message: dict[str, Any]) -> bool:
    """True if a message is an assistant's without text, thoughts and calls."""
    has_more = bool(message.get("tool_calls") or message.get("reasoning"))
    return message["role"] == "assistant" and not has_more and not plain_content(message.get("content"))[0].strip()


def _is_begun(message: dict[str, Any]) -> bool:
    """True if a message is the beginning of the answer, for the model to continue."""
    has_text = bool(plain_content(message.get("content"))[0])
    return message["role"] == "assistant" and has_text and not message.get("tool_calls")


def _add_message(chat: ForeignChat, message: dict[str, Any], name: str) -> None:
    """Add one message to the chat, where each result of a tool is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        chat.add(name, {"role": role, "content": content})
        return
    # Sort the blocks: results become messages of their own, the rest stays one message.
    calls, thoughts, rest = [], "", []
    for block in content:
        kind = kind_of(block)
        if kind == "tool_result":
            id_ = None if (wanted := block.get("tool_use_id")) is None else str(wanted)
            chat.add(name, {"role": "tool", "tool_call_id": id_, "content": block.get("content") or ""})
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "thinking":
            thoughts += str(block.get("thinking", ""))
        elif role == "assistant" and kind.endswith(_SERVER_KINDS) and not text_in(block):
            chat.left_out.append(f"{name}.{kind}")
        elif kind != "redacted_thinking":
            rest.append(block)
    if rest or calls or thoughts:
        message = {"role": role, "content": rest, "tool_calls": calls or None, "reasoning": thoughts or None}
        chat.add(name, {key: value for key, value in message.items() if value is not None})


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input")}
    return {"id": block.get("id"), "type": "function", "function": function}


def _function(tool: dict[str, Any], rank: int) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"tools.{rank} has no name.", param=f"tools.{rank}.name")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> object:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(f"tool_choice is {kind!r}; it must be auto, any, tool or none.", param="tool_choice")
    return _CHOICES[kind]


class MessagesWriter(NamedEventWriter):
    """Blocks follow one another, and one at a time is open."""

    _rank = -1
    _open: str | None = None  # the type of the block that is open
    _is_started = False
    _last: Delta | None = None

    def full(self, gained: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for event in chain.from_iterable(self.chunks(delta) for delta in gained[0]):
            match event:
                case {"content_block": block}:
                    content.append({**block, "input": ""} if block["type"] == "tool_use" else block)
                case {"delta": {"type": "input_json_delta", "partial_json": piece}}:
                    content[-1]["input"] += piece
                case {"delta": {"type": "thinking_delta" | "text_delta" as kind} as delta}:
                    name = kind.removesuffix("_delta")
                    content[-1][name] += delta[name]
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = _input(block["input"])
        return self._message(content, self._last)

    def _begin(self, delta: Delta) -> Iterable[dict[str, Any]]:
        if not self._is_started:
            self._is_started = True
            yield _event("message_start", message=self._message([], None))

    def _chunks(self, piece: Delta) -> Iterable[dict[str, Any]]:
        if piece.reasoning:
            yield from self._gain("thinking", {"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._gain("text", {"type": "text_delta", "text": piece.text})
        for call in piece.tool_calls:
            if call.id is not None:
                yield from self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        if piece.finish_reason is not None:
            self._last = piece

    def last_chunks(self) -> Iterable[dict[str, Any]]:
        yield from self._stop()
        if self._last is not None:
            yield _event("message_delta", delta=self._ending(self._last), usage=self._usage(), **self._signed())
        yield _event("message_stop")

    def error_event(self, error: ServingError) -> bytes:
        return f"event: error\ndata: {json.dumps(anthropic_error_object(error))}\n\n".encode()

    def _message(self, content: list[dict[str, Any]], last: Delta | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.id.rpartition('-')[2]}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.model_id,
            "content": content,
            **self._ending(last),
            "usage": self._usage(),
            **self._mark(),
            **(self._signed() if last is not None else {}),
        }

    def _ending(self, last: Delta | None) -> dict[str, Any]:
        if last is None or last.finish_reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        reason = "stop_sequence" if last.stop_string is not None else _REASONS[last.finish_reason]
        if last.finish_reason is FinishReason.LENGTH and self._generation.fills_context:
            reason = "model_context_window_exceeded"  # a higher max_tokens would change nothing
        return {"stop_reason": reason, "stop_sequence": last.stop_string}

    def _usage(self) -> dict[str, int]:
        """Return the counts so far; as in Anthropic's API, cached tokens of the prompt are counted apart."""
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _gain(self, kind: str, delta: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if self._open != kind:
            empty = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
            yield from self._start(empty)
        yield self._delta(delta)

    def _start(self, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        yield from self._stop()
        self._rank += 1
        self._open = block["type"]
        yield _event("content_block_start", index=self._rank, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return _event("content_block_delta", index=self._rank, delta=delta)

    def _stop(self) -> Iterable[dict[str, Any]]:
        if self._open is None:
            return
        if self._open == "thinking":  # clients expect a signature; nothing here would check one
            yield self._delta({"type": "signature_delta", "signature": ""})
        self._open = None
        yield _event("content_block_stop", index=self._rank)


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; those that the length cut off are no JSON, and empty."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}

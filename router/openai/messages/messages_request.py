"""The body of `/v1/messages` and `/v1/messages/count_tokens`, and the chat that it is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from protos.errors import RequestError
from router.requests.body import Body
from router.requests.foreign_turn import ForeignTurn, text_of
from router.requests.generation_fields import Int, Seed, SpeculationFields, TokenLimit

_TEXT = ("text",)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(Body):
    """The body, as Anthropic's clients send it; `seed`, `cache_salt`, `store` and `speculation` are ours."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: TokenLimit | None = None
    system: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    cache_control: Any = None
    service_tier: str | None = None
    seed: Seed | None = None
    cache_salt: str | None = None
    store: bool | None = None
    speculation: SpeculationFields | None = None

    def to_chat(self) -> ForeignTurn:
        """Return the turn as a chat; an assistant's message at its end is continued. Raises `RequestError`."""
        tools = list(enumerate(self.tools or []))
        own = [_function(tool, rank) for rank, tool in tools if tool.get("type") in (None, "custom")]
        foreign = [f"tools.{rank}" for rank, tool in tools if tool.get("type") not in (None, "custom")]
        messages = [*self._system(), *self._messages()]
        if not messages:
            raise RequestError("messages have no content; send a text at least.", param="messages")
        is_prefill = messages[-1]["role"] == "assistant" and bool(messages[-1].get("content"))
        choice = self.tool_choice or {}
        chat = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "continue_final_message": is_prefill or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "tools": own or None,
            "tool_choice": _choice(choice) if choice else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "chat_template_kwargs": self._thinking(),
            "response_format": self._format(),
            "reasoning_effort": (self.output_config or {}).get("effort"),
            "user": (self.metadata or {}).get("user_id"),
            "seed": self.seed,
            "cache_salt": self.cache_salt,
            "speculation": self.speculation and self.speculation.model_dump(exclude_unset=True),
            "store": self.store,
        }
        return ForeignTurn(chat, foreign)

    def _system(self) -> list[dict[str, Any]]:
        text = text_of(self.system, _TEXT, "system")
        return [{"role": "system", "content": text}] if text else []

    def _messages(self) -> list[dict[str, Any]]:
        return [said for message in self.messages for said in _said(message)]

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


def _said(message: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield one message as those of a chat: each result of a tool is a message of its own there."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    blocks = [block for block in content if isinstance(block, dict)]
    if len(blocks) < len(content):
        raise RequestError("a message's content holds something that is no object.", param="messages")
    for block in blocks:
        if block.get("type") == "tool_result":
            text = text_of(block.get("content"), _TEXT, "messages")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    thoughts = "".join(str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking")
    others = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [block for block in blocks if block.get("type") not in others]
    text = text_of(rest, _TEXT, "messages")
    if rest or calls or thoughts:
        said: dict[str, Any] = {"role": role, "content": text}
        yield {**said, **({"tool_calls": calls} if calls else {}), **({"reasoning": thoughts} if thoughts else {})}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
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

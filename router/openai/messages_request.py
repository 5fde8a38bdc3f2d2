"""The body of `/v1/messages` and `/v1/messages/count_tokens`, and the chat that it is."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from protos.errors import RequestError
from router.requests.body import Body
from router.requests.foreign_turn import ForeignChat, ForeignTurn
from router.requests.generation_fields import Int, Seed, SpeculationFields, TokenLimit
from router.tokenizer.content_parts import kind_of, plain_content, text_in

_SERVER_KINDS = ("_use", "_result")  # of blocks about what Anthropic's servers did
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(Body):
    """The body, as Anthropic's clients send it; `seed`, `cache_salt`, `store`, `receipt` and `speculation` are ours."""

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
    receipt: bool | None = None
    speculation: SpeculationFields | None = None

    def to_chat(self) -> ForeignTurn:
        """Return the turn as a chat; an assistant's message at its end is continued. Raises `RequestError`."""
        tools = list(enumerate(self.tools or []))
        own = [_function(tool, rank) for rank, tool in tools if tool.get("type") in (None, "custom")]
        foreign = [f"tools.{rank}" for rank, tool in tools if tool.get("type") not in (None, "custom")]
        conversation = self._conversation()
        is_prefill = _is_begun(conversation.messages[-1])
        choice = self.tool_choice or {}
        fields = {
            "model": self.model,
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
            "receipt": self.receipt,
        }
        return ForeignTurn(fields, conversation, foreign)

    def _conversation(self) -> ForeignChat:
        chat = ForeignChat()
        if plain_content(self.system).text:
            chat.add("system", {"role": "system", "content": self.system})
        for rank, message in enumerate(self.messages):
            _say(chat, message, f"messages.{rank}")
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


def _is_begun(message: dict[str, Any]) -> bool:
    """True if a message is the beginning of the answer, for the model to continue."""
    has_text = bool(plain_content(message.get("content")).text)
    return message["role"] == "assistant" and has_text and not message.get("tool_calls")


def _say(chat: ForeignChat, message: dict[str, Any], name: str) -> None:
    """Add one message to the chat; there, each result of a tool becomes a message of its own."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        chat.add(name, {"role": role, "content": content})
        return
    # Sort the blocks: results become messages of their own, the rest stays one message.
    calls, thoughts, rest = [], "", []
    for block in content:
        kind = kind_of(block)
        if kind == "tool_result":
            chat.add(name, {"role": "tool", "tool_call_id": _id(block.get("tool_use_id")), "content": _output(block)})
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "thinking":
            thoughts += str(block.get("thinking", ""))
        elif role == "assistant" and kind.endswith(_SERVER_KINDS) and not text_in(block):
            chat.left_out.append(f"{name}.{kind}")
        elif kind != "redacted_thinking":
            rest.append(block)
    if rest or calls or thoughts:
        said = {"role": role, "content": rest, "tool_calls": calls or None, "reasoning": thoughts or None}
        chat.add(name, {key: value for key, value in said.items() if value is not None})


def _output(block: dict[str, Any]) -> object:
    return block.get("content") or ""


def _id(value: object) -> str | None:
    return None if value is None else str(value)


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

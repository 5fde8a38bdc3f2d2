"""A message of a chat: its schema, and its form in a chat template."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from protos.errors import RequestError
from router.requests.body import Body, read_json


def _join_text_parts(value: object) -> object:
    if not isinstance(value, list):
        return value
    texts = []
    for rank, part in enumerate(value):
        text = _text_of(part)
        if text is None:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"content[{rank}] is of type {kind!r}; this model reads text only.", param="messages")
        texts.append(text)
    return "".join(texts)


def _text_of(part: object) -> str | None:
    """Return the text of a content part, nothing of one that replays thoughts; None if it is no text."""
    if not isinstance(part, dict):
        return None
    match part.get("type"):
        case "text":
            text = part.get("text")
        case "refusal":
            text = part.get("refusal")
        case "thinking" | "redacted_thinking" | "reasoning":
            return ""
        case _:
            return None
    return text if isinstance(text, str) else None


# Of an answer that is sent back as it came: `content` and `thoughts` say it all.
_SAID_ELSEWHERE = {
    "annotations",
    "parsed",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "thinking_blocks",
    "provider_specific_fields",
    "cache_control",
}

_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]}


class Role(StrEnum):
    """The author of a message; `developer` is OpenAI's newer name of `system`."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    FUNCTION = "function"


MAX_MESSAGES = 1 << 16  # of one chat: it also bounds the number of mistakes that are listed


class ChatMessageFields(Body):
    """One message, an answer of ours as `model_dump()` writes it included."""

    role: Annotated[Role, Field(strict=False)]
    content: Annotated[str | None, BeforeValidator(_join_text_parts), WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name of `reasoning`
    thinking_blocks: list[dict[str, Any]] | None = None  # LiteLLM's form of the same
    reasoning_details: Any = None
    provider_specific_fields: Any = None
    cache_control: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    parsed: Any = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _needs_content(self) -> ChatMessageFields:
        if self.content is None and self.role is not Role.ASSISTANT:
            raise RequestError(f"a message of role {self.role.value!r} has no content.", param="messages")
        return self

    @property
    def thoughts(self) -> str:
        """The reasoning of an answer that is sent back, under whichever name it came."""
        blocks = self.thinking_blocks or []
        texts = [block.get("thinking") for block in blocks]
        return self.reasoning or self.reasoning_content or "".join(text for text in texts if isinstance(text, str))

    def for_template(self) -> dict[str, object]:
        """Return the message as chat templates expect it.

        The arguments of calls are objects there, not JSON texts, and `developer` is `system`.
        """
        fields = self.model_dump(exclude_none=True, exclude=_SAID_ELSEWHERE)
        if self.tool_calls is not None:
            fields["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
            fields.setdefault("content", "")  # which many templates read without asking for it
        if self.thoughts:  # each family of templates has its own name for them
            fields |= {"reasoning_content": self.thoughts, "reasoning": self.thoughts, "thinking": self.thoughts}
        fields["role"] = str(Role.SYSTEM if self.role is Role.DEVELOPER else self.role)
        return fields


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("a message's tool call has no function with a name.", param="messages")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = read_json(arguments, "the arguments of a message's tool call", "messages")
    return {**call, "function": {**function, "arguments": arguments}}

"""A message of a chat: its schema, and its form in a chat template."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from protos.errors import RequestError
from router.requests.body import Body
from router.requests.json_text import read_json


def _join_text_parts(value: object) -> object:
    if not isinstance(value, list):
        return value
    texts = []
    for rank, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"content[{rank}] is of type {kind!r}; this model reads text only.", param="messages")
        texts.append(part["text"])
    return "".join(texts)


_SAID_ELSEWHERE = {"annotations", "parsed"}  # of an answer that is sent back as it came; `content` says it all


class Role(StrEnum):
    """The author of a message; `developer` is OpenAI's newer name of `system`."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    FUNCTION = "function"


class ChatMessageFields(Body):
    """One message, an answer of ours as `model_dump()` writes it included."""

    role: Annotated[Role, Field(strict=False)]
    content: Annotated[str | None, BeforeValidator(_join_text_parts)] = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
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

    def for_template(self) -> dict[str, object]:
        """Return the message as chat templates expect it.

        The arguments of calls are objects there, not JSON texts, and `developer` is `system`.
        """
        fields = self.model_dump(exclude_none=True, exclude=_SAID_ELSEWHERE)
        if self.tool_calls is not None:
            fields["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
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

"""A message of a chat: its schema, and its form in a chat template.

History is accepted leniently: truncated calls, unsupported parts and older spellings are taken as far as they have a
text. `ChatCompletionRequest` checks the last turn strictly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ModelWrapValidatorHandler, PrivateAttr, WithJsonSchema, model_validator

from protos.client_text import check_parts
from router.requests.body import Body
from router.tokenizer.content_parts import plain_content

# Fields of an answer sent back unchanged; `content`, `calls` and `thoughts` already hold all of it.
_COVERED = {
    "annotations",
    "audio",
    "function_call",
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
# The types of a message's fields other than role and content.
_KINDS: dict[str, type[Any]] = {
    **dict.fromkeys(("name", "tool_call_id", "refusal", "reasoning", "reasoning_content"), str),
    **dict.fromkeys(("tool_calls", "thinking_blocks"), list),
    "function_call": dict,
}
_UNKNOWN = "unknown"  # the name of a function that a call does not name


# The author of a message. `developer` is OpenAI's newer name of `system`, `function` the older one of `tool`, and
# `ipython` Llama's. Any other role is refused: most templates would leave its text out without a word.
Role = Literal["system", "developer", "user", "assistant", "tool", "function", "ipython"]
RESULTS = ("tool", "function", "ipython")
_TEMPLATE_ROLES = {"developer": "system"} | dict.fromkeys(RESULTS, "tool")


class ChatMessageFields(Body):
    """One message, an answer of ours as `model_dump()` writes it included."""

    role: Role
    content: Annotated[str | None, WithJsonSchema(_CONTENT_SCHEMA)] = None
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
    audio: Any = None
    function_call: dict[str, Any] | None = None  # the older form of a single call
    _unread: tuple[tuple[int, str], ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _read_content(cls, value: Any, handler: ModelWrapValidatorHandler[ChatMessageFields]) -> ChatMessageFields:
        if not isinstance(value, Mapping):
            return handler(value)
        is_history = value.get("role") in (*RESULTS, "assistant")
        if is_history:
            value = _readable(value)
        content = value.get("content")
        if isinstance(content, str | None) or (not isinstance(content, list) and not is_history):
            return handler(value)
        text, unread = plain_content(value["content"])
        message = handler({**value, "content": text})
        message._unread = unread
        return message

    @property
    def unread(self) -> tuple[tuple[int, str], ...]:
        """The kinds of the content's parts that have no text, by their places."""
        return self._unread

    @property
    def thoughts(self) -> str:
        """The reasoning of an answer that is sent back, under any of its names."""
        blocks = self.thinking_blocks or []
        texts = [block.get("thinking") for block in blocks]
        return self.reasoning or self.reasoning_content or "".join(text for text in texts if isinstance(text, str))

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it.

        The arguments of calls become objects if they are valid JSON; the role `developer` becomes `system`.
        """
        fields = self.model_dump(exclude_none=True, exclude=_COVERED)
        fields["role"] = _TEMPLATE_ROLES.get(self.role, self.role)
        if self.role == "assistant":
            fields |= self._answer(fields.pop("tool_calls", None) or [], fields.get("content"))
        else:
            fields.setdefault("content", "")
        if self.thoughts:  # each family of templates has its own name for them
            fields |= {"reasoning_content": self.thoughts, "reasoning": self.thoughts, "thinking": self.thoughts}
        return fields

    def _answer(self, calls: list[dict[str, Any]], content: str | None) -> dict[str, Any]:
        """Return the content and the calls of an assistant's message."""
        if self.function_call is not None:
            calls = [*calls, {"function": self.function_call}]
        text = content or self.refusal
        if calls:  # many templates read the content of such messages without asking for it
            return {"content": text or "", "tool_calls": [_call_for_template(call) for call in calls]}
        return {} if text is None else {"content": text}


def _readable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the history without values of a wrong type; ids become texts."""
    read = dict(message)
    for name in ("tool_call_id", "name"):
        if type(read.get(name)) in (int, float):
            read[name] = str(read[name])
    for name, kind in _KINDS.items():
        if not isinstance(read.get(name), kind):
            read.pop(name, None)
    for name in ("tool_calls", "thinking_blocks"):
        if isinstance(read.get(name), list):
            read[name] = [each for each in read[name] if isinstance(each, Mapping)]
    return read


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with a type, a function's name and arguments, as far as the given form has them."""
    match call:
        case {"function": dict(function)}:
            outer, arguments = call, function.get("arguments")
        case {"custom": dict(custom)}:
            function, outer, arguments = {}, {"id": call.get("id")}, {"input": custom.get("input")}
            function["name"] = custom.get("name")
        case _:
            function, outer, arguments = {"name": call.get("name")}, {"id": call.get("id")}, call.get("arguments")
    name = function.get("name")
    whole = {
        **outer,
        "type": "function",
        "function": {
            **function,
            "name": name if isinstance(name, str) and name else _UNKNOWN,
            "arguments": _read_arguments(arguments),
        },
    }
    if whole.get("id") is None:
        return {key: value for key, value in whole.items() if key != "id"}
    return {**whole, "id": str(whole["id"])}


def _read_arguments(arguments: object) -> dict[str, Any] | str:
    """Return the arguments as an object, or as text if they are not one, since the answer was truncated."""
    if arguments is None:
        return {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text = text.encode(errors="replace").decode()
    if not text.strip():
        return {}
    check_parts(text.encode(), "the arguments of a message's tool call")
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be sent
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value if isinstance(value, dict) else text

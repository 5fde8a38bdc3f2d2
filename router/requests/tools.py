"""The tools of a chat: those that a client offers, and those that the model may or must call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from protos.errors import RequestError
from router.requests.body import Body
from router.tokenizer.content_parts import Message, with_written_calls

# Of a function's name: letters, digits and the marks that MCP servers put between their names and their tools'.
NAME_PATTERN = "[a-zA-Z0-9_.:/-]{1,128}"
_Mode = Literal["none", "auto", "required"]  # no call, a call if the model decides so, or at least one call
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_INSTRUCTIONS = """\
# Tools
You may call these functions to help the user:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and its arguments between two marks. For example:
<tool_call>
{example}
</tool_call>
The results come in the next message, between <tool_response> and </tool_response>."""


class Function(Body):
    """One function; without `parameters` it takes none. `strict` holds the model to them even where it may choose."""

    name: Annotated[str, Field(pattern=rf"^{NAME_PATTERN}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _refuse_arguments_that_are_no_object(self) -> Function:
        kinds = (self.parameters or {}).get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise RequestError(
                f"the parameters of function {self.name!r} have the type {kinds!r}; arguments are an object.",
                param="tools",
            )
        return self

    @property
    def schema_(self) -> dict[str, Any]:
        """The JSON schema of a call's arguments, which are an object also where it leaves that open."""
        return _NO_PARAMETERS if self.parameters is None else {**self.parameters, "type": "object"}


class Tool(Body):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None  # Anthropic's; every prefix is cached here


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use that the model may make of the tools: `callable_` are those it can choose from.

    `is_required`: the answer is calls and nothing else. `is_parallel`: more than one call is allowed.
    """

    tools: tuple[Tool, ...]
    callable_: tuple[Function, ...]
    is_required: bool
    is_parallel: bool

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}, "cache_control": True})
            for tool in self.tools
        ]


def tool_use(tools: list[Tool] | None, choice: object, is_parallel: bool | None) -> ToolUse | None:
    """Return the meaning of `tools`, `tool_choice` and `parallel_tool_calls`; None where no tool may be called.

    Raises:
        RequestError: they contradict each other.
    """
    offered = _by_name(tools or [])
    mode, names = _read_choice(choice)
    _check_choice(mode, names or [], choice, offered)
    if not offered or mode == "none":
        return None
    callable_ = tuple(offered.values()) if names is None else tuple(offered[name] for name in dict.fromkeys(names))
    is_one = isinstance(choice, dict) and choice.get("type") == "function"
    return ToolUse(
        tools=tuple(tools or ()),
        callable_=callable_,
        is_required=mode == "required",
        is_parallel=is_parallel is not False and not is_one,
    )


def _by_name(tools: list[Tool]) -> dict[str, Function]:
    functions = {tool.function.name: tool.function for tool in tools}
    if len(functions) < len(tools):
        raise RequestError("tools holds two functions of the same name.", param="tools")
    return functions


def _read_choice(choice: object) -> tuple[_Mode, list[str] | None]:
    """Return the mode of a `tool_choice`, and the functions that it names; None where all of them may be called."""
    match choice:
        case None:
            return "auto", None
        case "none" | "auto" | "required" as mode:
            return mode, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", [name]
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            return mode, [_allowed_name(tool) for tool in tools]
    raise RequestError(
        f"tool_choice is {json.dumps(choice)}; it must be 'none', 'auto', 'required', "
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": '
        '{"mode": "auto" or "required", "tools": [...]}}.',
        param="tool_choice",
    )


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise RequestError(
        f'tool_choice allows {json.dumps(tool)}; send {{"type": "function", "function": {{"name": ...}}}}.',
        param="tool_choice",
    )


def _check_choice(mode: _Mode, names: list[str], choice: object, offered: dict[str, Function]) -> None:
    if mode == "required" and not offered:
        raise RequestError(f"tool_choice is {json.dumps(choice)}, but there are no tools.", param="tool_choice")
    for name in names:
        if name not in offered:
            raise RequestError(
                f"tool_choice names {name!r}; the tools are {', '.join(offered)}.", param="tool_choice.function.name"
            )


def with_prompted_tools(messages: Sequence[Mapping[str, Any]], use: ToolUse | None) -> list[Message]:
    """Return an equivalent chat without tools: tools, earlier calls and their results become text."""
    written = with_written_calls(messages)
    return written if use is None else _with_instructions(written, use)


def _with_instructions(messages: list[Message], use: ToolUse) -> list[Message]:
    text = _INSTRUCTIONS.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in use.for_template),
        example=json.dumps({"name": use.callable_[0].name, "arguments": {}}, ensure_ascii=False),
    )
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [first | {"content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]

"""The tools of a chat: what a client offers, and which of them the model may or must call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from protos.errors import RequestError
from router.requests.body import Body

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Body):
    """One function; without `parameters` it takes none. `strict` holds the model to them even where it may choose."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_(self) -> dict[str, Any]:
        """What a call's arguments must match."""
        return _NO_PARAMETERS if self.parameters is None else self.parameters


class Tool(Body):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may do with the tools: `callable_` are those it can choose from.

    `is_required`: the answer is calls and nothing else. `is_parallel`: more than one call is allowed.
    """

    tools: tuple[Tool, ...]
    callable_: tuple[Function, ...]
    is_required: bool
    is_parallel: bool

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools]


def tool_use(tools: list[Tool] | None, choice: object, is_parallel: bool | None) -> ToolUse | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` mean together; None where no tool may be called.

    Raises:
        RequestError: they contradict each other.
    """
    offered = {tool.function.name: tool.function for tool in tools or ()}
    if len(offered) < len(tools or ()):
        raise RequestError("tools holds two functions of the same name.", param="tools")
    name = _named(choice)
    if not offered:
        if choice not in (None, "none", "auto"):
            raise RequestError(f"tool_choice is {json.dumps(choice)}, but there are no tools.", param="tool_choice")
        return None
    if name is not None and name not in offered:
        raise RequestError(
            f"tool_choice names {name!r}; the tools are {', '.join(offered)}.", param="tool_choice.function.name"
        )
    if choice == "none":
        return None
    callable_ = tuple(offered.values()) if name is None else (offered[name],)
    is_required = name is not None or choice == "required"
    return ToolUse(tuple(tools or ()), callable_, is_required, is_parallel is not False and name is None)


def _named(choice: object) -> str | None:
    """The function that `tool_choice` names, if it names one."""
    if choice is None or choice in ("none", "auto", "required"):
        return None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if isinstance(name, str):
            return name
    raise RequestError(
        f"tool_choice is {json.dumps(choice)}; it must be 'none', 'auto', 'required', or "
        '{"type": "function", "function": {"name": ...}}.',
        param="tool_choice",
    )

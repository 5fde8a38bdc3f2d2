"""Tools for a model whose chat template has none: described in the system message, in Hermes's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.requests.tools import ToolUse
from router.tokenizer.written_calls import Message, with_written_calls

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

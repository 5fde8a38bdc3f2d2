"""Tools for a model whose chat template has none: described in the system message, in Hermes's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from router.requests.tools import ToolUse

Message = dict[str, object]

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


def with_prompted_tools(messages: Sequence[Mapping[str, object]], use: ToolUse | None) -> list[Message]:
    """Return a chat without tools that says the same: they, earlier calls and their results are text."""
    written: list[Message] = []
    for rank, message in enumerate(messages):
        if message["role"] != "tool":
            written.append(_without_calls(message))
        elif rank and messages[rank - 1]["role"] == "tool":  # one turn for both, since templates want turns in turn
            written[-1]["content"] = f"{written[-1]['content']}\n{_result(message)}"
        else:
            written.append({"role": "user", "content": _result(message)})
    return written if use is None else _with_instructions(written, use)


def _without_calls(message: Mapping[str, object]) -> Message:
    calls = message.get("tool_calls")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list) or not calls:
        return rest
    texts = [str(message.get("content") or "")]
    for call in calls:
        function = call["function"]
        body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
        texts.append(f"<tool_call>\n{body}\n</tool_call>")
    return rest | {"content": "\n".join(filter(None, texts))}


def _result(message: Mapping[str, object]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_instructions(messages: list[Message], use: ToolUse) -> list[Message]:
    text = _INSTRUCTIONS.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in use.for_template),
        example=json.dumps({"name": use.callable_[0].name, "arguments": {}}, ensure_ascii=False),
    )
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [first | {"content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]

"""Calls and their results as plain text, in Hermes's form, for chat templates that show neither."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]


def with_written_calls(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return an equivalent chat without calls: a call becomes assistant text, its result user text."""
    written: list[Message] = []
    for rank, message in enumerate(messages):
        if message["role"] != "tool":
            written.append(_without_calls(message))
        elif rank and messages[rank - 1]["role"] == "tool":  # one turn for both, since templates want turns in turn
            written[-1]["content"] = f"{written[-1]['content']}\n{written_result(message)}"
        else:
            written.append({"role": "user", "content": written_result(message)})
    return written


def written_result(message: Mapping[str, Any]) -> str:
    """Return a call's result as text."""
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"


def _without_calls(message: Mapping[str, Any]) -> Message:
    calls = message.get("tool_calls")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if not calls:
        return rest
    texts = [str(message.get("content") or "")]
    for call in calls:
        function = call["function"]
        body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
        texts.append(f"<tool_call>\n{body}\n</tool_call>")
    return rest | {"content": "\n".join(filter(None, texts))}

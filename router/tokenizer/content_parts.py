"""The parts of a message's content as one text, in the form of any API.

A picture, a sound or a file has no text. In the history a note replaces it, so that a chat with one can go on; in the
last turn it is refused by name (`ChatCompletionRequest`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
_NATIVE = ("text", "input_text", "output_text", "refusal")
_BYTES = {"image": "image", "screenshot": "image", "audio": "audio", "video": "video"}  # kinds without a text
_NOTES = {**_BYTES, "file": "file", "document": "file", "upload": "file"}
# The keys of texts in parts and items of other kinds, in the order they are tried.
_TEXT_KEYS = (
    *("title", "url", "text", "refusal", "logs", "stdout", "stderr"),
    *("content", "output", "source", "resource", "results", "outputs"),
)
_SOURCES = ("base64", "url", "file")  # of bytes


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


def plain_content(content: object) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return the text of a string, of parts, or of anything else that a tool may have answered.

    Return also the kinds of the parts that have none, by their places.
    """
    if content is None or isinstance(content, str):
        return content or "", ()
    if isinstance(content, Mapping) and "type" in content:
        content = [content]
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False), ()
    pieces: list[tuple[str, bool]] = []  # a text, and whether it joins its neighbours as it is
    unread = []
    for place, part in enumerate(content):
        kind = kind_of(part)
        text = text_in(part)
        if not text and not _may_be_empty(part, kind):
            unread.append((place, kind))
            text = note_for(kind)
        if text:
            pieces.append((text, kind in _NATIVE))
    return _joined(pieces), tuple(unread)


def _may_be_empty(part: object, kind: str) -> bool:
    texts = (part.get("text"), part.get("refusal")) if isinstance(part, Mapping) else (part,)
    return kind in _THOUGHTS or (kind in _NATIVE and "" in texts)


def _joined(pieces: list[tuple[str, bool]]) -> str:
    text = ""
    was_native = True
    for piece, is_native in pieces:
        text += piece if not text or (is_native and was_native) else f"\n{piece}"
        was_native = is_native
    return text


def kind_of(part: object) -> str:
    """Return the type of a part, or of a bare value; a string is a part of type text."""
    if isinstance(part, str):
        return "text"
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else type(part).__name__


def note_for(kind: str) -> str:
    """Return the note that replaces a part without text."""
    return f"[{next((note for name, note in _NOTES.items() if name in kind), 'content')} omitted]"


def text_in(value: object, depth: int = 0) -> str:
    """Return the text in a part or an item; nothing of thoughts, of encrypted texts and of bytes."""
    if isinstance(value, str) or depth > 8:
        return value if isinstance(value, str) else ""
    if isinstance(value, list):
        return "\n".join(filter(None, (text_in(each, depth + 1) for each in value)))
    if not isinstance(value, Mapping) or _is_textless(value):
        return ""
    if value.get("type") == "text" and isinstance(value.get("data"), str):  # a document's source
        return str(value["data"])
    texts = (text_in(value.get(key), depth + 1) for key in _TEXT_KEYS)
    return "\n".join(filter(None, texts))


def _is_textless(part: Mapping[str, object]) -> bool:
    kind = kind_of(part)
    return kind in (*_THOUGHTS, *_SOURCES) or any(name in kind for name in _BYTES)

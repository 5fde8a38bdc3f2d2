"""Changes of a chat that keep its texts and its meaning, one for each thing that chat templates refuse or lose.

They are pure functions of messages as `ChatMessageFields.for_template` writes them. No text of a user or of a tool ever
becomes the system's. Four texts are inserted: `GO_ON` as a user's turn, `YES` as an assistant's, two notes as results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from router.tokenizer.call_repairs import THOUGHTS, Messages, calls_of, without
from router.tokenizer.content_parts import Message

GO_ON, YES = "Continue.", "OK."
_NO_OUTPUT = "[no output]"
_HARMONY_HEAD = re.compile(r"<\|channel\|>(\w*)[^<]*(?:<\|constrain\|>\w*)?<\|message\|>")
_HARMONY_MARK = re.compile(r"<\|(?:start\|>assistant|end\|>|return\|>|call\|>)")

Repair = Callable[[Messages], Messages]


def fill_contents(messages: Messages) -> Messages:
    """Give every message a content: many templates read it without asking for it."""
    return [{**message, "content": message.get("content") or ""} for message in messages]


def one_system(messages: Messages) -> Messages:
    """Join the system messages at the beginning."""
    num_first = _num_systems(messages)
    if num_first < 2:
        return messages
    text = _joined([message.get("content") for message in messages[:num_first]])
    return [{**messages[0], "content": text}, *messages[num_first:]]


def _num_systems(messages: Messages) -> int:
    return next((place for place, each in enumerate(messages) if each["role"] != "system"), len(messages))


def _joined(texts: Sequence[object]) -> str:
    return "\n\n".join(str(text) for text in texts if text)


def late_systems_as_users(messages: Messages) -> Messages:
    """Make a system message that follows another turn a user's turn at its place, which keeps the order."""
    num_first = _num_systems(messages)
    late = [{**message, "role": "user"} if message["role"] == "system" else message for message in messages[num_first:]]
    return messages[:num_first] + late


def system_for_tools(messages: Messages) -> Messages:
    """Begin with a system message, if need be an empty one: some templates describe tools only in it."""
    has_system = any(message["role"] == "system" for message in messages)
    return messages if has_system else [{"role": "system", "content": ""}, *messages]


def no_system(messages: Messages) -> Messages:
    """Put the system's text before the first user's."""
    first = one_system(messages)
    if not _num_systems(first):
        return messages
    system, rest = first[0], first[1:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": _joined([system.get("content"), rest[0].get("content")])}, *rest[1:]]
    return [{**system, "role": "user"}, *rest] if system.get("content") else rest


def system_in_last_user(messages: Messages) -> Messages:
    """Put the system's text before the last user's, where that is not the last turn.

    Some templates show a system message only in a last user's turn. The turns before it keep their tokens.
    """
    first = one_system(messages)
    if not _num_systems(first) or first[-1]["role"] == "user":
        return first
    place = max((place for place, each in enumerate(first) if each["role"] == "user"), default=None)
    if place is None:
        return no_system(first)
    text = _joined([first[0].get("content"), first[place].get("content")])
    return [*first[1:place], {**first[place], "content": text}, *first[place + 1 :]]


def text_before_calls(messages: Messages, *, is_answered: bool = False) -> Messages:
    """Give the text of a message with calls a message of its own, before them.

    `is_answered`: only before an answer without calls.
    """
    last_answer = max((place for place, each in enumerate(messages) if _is_answer(each)), default=-1)
    split: Messages = []
    for place, message in enumerate(messages):
        if calls_of(message) and message.get("content") and (place < last_answer or not is_answered):
            split += [{"role": "assistant", "content": message["content"]}, {**message, "content": ""}]
        else:
            split.append(message)
    return split


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not calls_of(message)


def text_into_thought(messages: Messages) -> Messages:
    """Add the text of a message with calls to its thought, where a template takes one of the two."""
    return [
        without(message, "content") | dict.fromkeys(THOUGHTS, _joined([message["thinking"], message["content"]]))
        if calls_of(message) and message.get("thinking") and message.get("content")
        else message
        for message in messages
    ]


def harmony_as_fields(messages: Messages) -> Messages:
    """Split an answer with harmony's marks, which some clients send back unread, into its thoughts and its text."""
    return [_without_harmony(message) if message["role"] == "assistant" else message for message in messages]


def _without_harmony(message: Message) -> Message:
    fields = {
        name: _harmony_messages(message[name]) for name in ("content", *THOUGHTS) if _is_harmony(message.get(name))
    }
    plain = {name: _joined([text for _, text in parts]) for name, parts in fields.items()}
    if content := fields.get("content"):
        plain["content"] = _joined([text for channel, text in content if channel != "analysis"])
        if thought := _joined([text for channel, text in content if channel == "analysis"]):
            plain |= dict.fromkeys(THOUGHTS, thought)
    return {**message, **plain}


def _is_harmony(text: str | None) -> bool:
    return _HARMONY_HEAD.search(text or "") is not None


def _harmony_messages(text: str) -> list[tuple[str, str]]:
    """Return the channel and the text of each message; text before the first mark has no channel."""
    before, *parts = _HARMONY_HEAD.split(text)
    messages = [("", before), *zip(parts[::2], parts[1::2], strict=True)]
    return [(channel, _HARMONY_MARK.sub("", each).strip()) for channel, each in messages]


def no_text_is_none(messages: Messages) -> Messages:
    """Set the empty content of a message with calls to None, since some templates show calls only then."""
    return [
        {**message, "content": None} if calls_of(message) and not message.get("content") else message
        for message in messages
    ]


def no_empty_assistant(messages: Messages) -> Messages:
    """Drop empty assistant messages."""
    return [message for message in messages if message.get("content") or not _is_answer(message)]


def no_empty_system(messages: Messages) -> Messages:
    """Drop empty system messages."""
    return [message for message in messages if message.get("content") or message["role"] != "system"]


def no_empty_user(messages: Messages) -> Messages:
    """Put `GO_ON` into an empty user turn."""
    return _instead_of_nothing(messages, "user", GO_ON)


def no_empty_result(messages: Messages) -> Messages:
    """Put a note into an empty result."""
    return _instead_of_nothing(messages, "tool", _NO_OUTPUT)


def _instead_of_nothing(messages: Messages, role: str, text: str) -> Messages:
    return [
        {**message, "content": text} if message["role"] == role and not message.get("content") else message
        for message in messages
    ]


def user_first(messages: Messages, *, is_for_calls: bool = False) -> Messages:
    """Begin with a user's turn, after the system's; `is_for_calls`: only where calls would be first."""
    num_first = _num_systems(messages)
    first = messages[num_first] if num_first < len(messages) else None
    if first is not None and (first["role"] == "user" or (is_for_calls and not calls_of(first))):
        return messages
    return [*messages[:num_first], {"role": "user", "content": GO_ON}, *messages[num_first:]]


def user_last(messages: Messages) -> Messages:
    """End with a user's turn, where an assistant's text is last."""
    return [*messages, {"role": "user", "content": GO_ON}] if _is_answer(messages[-1]) else messages


def alternating(messages: Messages, *, is_around_tools: bool = False) -> Messages:
    """Join turns of one role that follow each other.

    `is_around_tools`: a message of the other role is put between two that surround calls and results.
    """
    ordered: Messages = []
    last = ""  # role of the last turn that is no call and no result
    for message in messages:
        role = message["role"]
        if role in ("user", "assistant") and not calls_of(message):
            if ordered and role == last and ordered[-1]["role"] == role and not calls_of(ordered[-1]):
                text = _joined([ordered[-1].get("content"), message.get("content")])
                ordered[-1] = {**ordered[-1], **message, "content": text}
                continue
            if role == last and is_around_tools:
                ordered.append(_filler("user" if role == "assistant" else "assistant"))
            last = role
        ordered.append(message)
    return ordered


def _filler(role: str) -> Message:
    return {"role": role, "content": GO_ON if role == "user" else YES}


def joined_to_calls(messages: Messages) -> Messages:
    """Join an assistant's text to its calls in the next message."""
    joined: Messages = []
    for message in messages:
        if calls_of(message) and joined and _is_answer(joined[-1]):
            text = _joined([joined[-1].get("content"), message.get("content")])
            joined[-1] = {**joined[-1], **message, "content": text}
        else:
            joined.append(message)
    return joined


def as_parts(messages: Messages) -> Messages:
    """Write contents as lists of parts."""
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]

"""Changes of a chat that keep its texts and its meaning, one for each thing that chat templates refuse or lose.

They are pure functions of messages as `ChatMessageFields.for_template` writes them. No text of a user or of a tool ever
becomes the system's. Four texts are inserted: `GO_ON` as a user's turn, `YES` as an assistant's, two notes as results.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from router.tokenizer.content_parts import Message, with_written_calls, written_result

GO_ON, YES = "Continue.", "OK."
_NO_OUTPUT, _NO_RESULT = "[no output]", "[no result]"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_TEXTS = ("reasoning_content", "reasoning", "thinking")
_HARMONY_HEAD = re.compile(r"<\|channel\|>(\w*)[^<]*(?:<\|constrain\|>\w*)?<\|message\|>")
_HARMONY_MARK = re.compile(r"<\|(?:start\|>assistant|end\|>|return\|>|call\|>)")

Messages = list[Message]
Repair = Callable[[Messages], Messages]


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of a message; none for one that has no calls."""
    return message.get("tool_calls") or []


def fill_contents(messages: Messages) -> Messages:
    """Give every message a content: many templates read it without asking for it."""
    return [{**message, "content": message.get("content") or ""} for message in messages]


def calls_as_text(messages: Messages) -> Messages:
    """Write calls and their results as text, where a chat has calls."""
    return with_written_calls(messages) if any(map(calls_of, messages)) else messages


def results_after_calls(messages: Messages) -> Messages:
    """Move each result directly after the call that its id names."""
    places: dict[str, deque[int]] = defaultdict(deque)
    for place, message in enumerate(messages):
        if message["role"] == "tool" and isinstance(message.get("tool_call_id"), str):
            places[message["tool_call_id"]].append(place)
    moved: set[int] = set()
    ordered: Messages = []
    for place, message in enumerate(messages):
        if place in moved:
            continue
        ordered.append(message)
        for call in calls_of(message):
            waiting = places.get(call.get("id") or "", deque())
            while waiting and waiting[0] <= place:
                waiting.popleft()
            if waiting:
                moved.add(waiting[0])
                ordered.append(messages[waiting.popleft()])
    return ordered


def results_for_calls(messages: Messages) -> Messages:
    """Add a note as the result of each call without one."""
    answered: Messages = []
    for message, results in _with_results(messages):
        answered += [message, *results]
        known = {result.get("tool_call_id") for result in results}
        missing = [call for call in calls_of(message) if call.get("id") not in known]
        answered += [_result_of(call) for call in missing[: max(len(calls_of(message)) - len(results), 0)]]
    return answered


def _result_of(call: Mapping[str, Any]) -> Message:
    named = {} if call.get("id") is None else {"tool_call_id": call["id"]}
    return {"role": "tool", "content": _NO_RESULT, **named}


def _with_results(messages: Messages) -> Iterator[tuple[Message, Messages]]:
    """Yield each message with the results that follow it, where it has calls."""
    place = 0
    while place < len(messages):
        end = place + 1
        while calls_of(messages[place]) and end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        yield messages[place], messages[place + 1 : end]
        place = end


def orphans_as_text(messages: Messages) -> Messages:
    """Write results that follow no call as a user's turn."""
    written: Messages = []
    has_calls = has_orphan = False
    for message in messages:
        is_orphan = message["role"] == "tool" and not has_calls
        if is_orphan and has_orphan:
            text = f"{written[-1]['content']}\n{written_result(message)}"
            written[-1] = {"role": "user", "content": text}
        else:
            written.append({"role": "user", "content": written_result(message)} if is_orphan else message)
        has_calls = bool(calls_of(message)) or (has_calls and message["role"] == "tool")
        has_orphan = is_orphan
    return written


def one_call_each(messages: Messages) -> Messages:
    """Give each of several calls a message of its own, followed by its result."""
    split: Messages = []
    for message, results in _with_results(messages):
        calls = calls_of(message)
        split += [message, *results] if len(calls) < 2 else _one_by_one(message, calls, results)
    return split


def _one_by_one(message: Message, calls: list[dict[str, Any]], results: Messages) -> Messages:
    places: dict[object, deque[int]] = defaultdict(deque)
    for place, result in enumerate(results):
        places[result.get("tool_call_id")].append(place)
    taken: set[int] = set()
    split: Messages = []
    for rank, call in enumerate(calls):
        first = {**message, "tool_calls": [call]}
        split.append(first if rank == 0 else {**_without(first, *_TEXTS), "content": ""})
        if waiting := places[call.get("id")] or places[None]:
            taken.add(waiting[0])
            split.append(results[waiting.popleft()])
    return [*split, *(result for place, result in enumerate(results) if place not in taken)]


def _without(message: Message, *names: str) -> Message:
    return {key: value for key, value in message.items() if key not in names}


def with_calls(messages: Messages, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Messages:
    """Return the chat with each function of a call changed."""
    return [
        {**message, "tool_calls": [{**call, "function": change(call["function"])} for call in calls]}
        if (calls := calls_of(message))
        else message
        for message in messages
    ]


def arguments_as_text(messages: Messages) -> Messages:
    """Write the arguments of calls as JSON texts."""

    def written(function: dict[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**function, "arguments": text}

    return with_calls(messages, written)


def arguments_as_objects(messages: Messages) -> Messages:
    """Put arguments that are no object, since the answer was cut, into one."""

    def held(function: dict[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        return function if isinstance(arguments, dict) else {**function, "arguments": {"arguments": arguments}}

    return with_calls(messages, held)


def short_ids(messages: Messages) -> Messages:
    """Give calls and their results ids of nine letters and digits, the same for the same id in every turn."""
    return _with_ids(messages, lambda id_: id_ if _SHORT_ID.fullmatch(id_) else _digest(id_, 9))


def long_ids(messages: Messages) -> Messages:
    """Give calls and their results ids in OpenAI's form."""
    return _with_ids(messages, lambda id_: id_ if id_.startswith("call_") else f"call_{_digest(id_, 24)}")


def ids_of_functions(messages: Messages) -> Messages:
    """Give calls and their results ids that name the function and count the calls, as Kimi's models write them."""
    return _renamed(messages, lambda call, rank: f"functions.{call['function']['name']}:{rank}")


def unique_ids(messages: Messages) -> Messages:
    """Replace ids that are missing or repeated. A result gets the id of its call; one without a call, a new id."""
    seen: set[object] = {None, ""}

    def own(entry: Mapping[str, Any], rank: int) -> str:
        id_ = entry.get("tool_call_id" if "role" in entry else "id")
        id_ = str(id_) if id_ not in seen else _digest(f"{id_} {rank}", 9)
        seen.add(id_)
        return id_

    return _renamed(messages, own, is_for_orphans=True)


def _renamed(
    messages: Messages, new_id: Callable[[Mapping[str, Any], int], str], *, is_for_orphans: bool = False
) -> Messages:
    """Give each call a new id by its rank, and each result the new id of its call or of the next unanswered call."""
    renamed: Messages = []
    waiting: dict[object, deque[str]] = defaultdict(deque)
    rank = 0
    for message in messages:
        if calls := calls_of(message):
            with_ids = [{**call, "id": new_id(call, rank + place)} for place, call in enumerate(calls)]
            rank += len(calls)
            waiting = defaultdict(deque)  # a result answers the last calls
            for call, own_call in zip(calls, with_ids, strict=True):
                waiting[call.get("id")].append(own_call["id"])
            renamed.append({**message, "tool_calls": with_ids})
        elif message["role"] == "tool" and (own := waiting[message.get("tool_call_id")] or _next_id(waiting)):
            renamed.append({**message, "tool_call_id": own.popleft()})
        elif message["role"] == "tool" and is_for_orphans:
            renamed.append({**message, "tool_call_id": new_id(message, rank)})
            rank += 1
        else:
            renamed.append(message)
    return renamed


def _next_id(waiting: Mapping[object, deque[str]]) -> deque[str]:
    return next((ids for ids in waiting.values() if ids), deque())


def _digest(id_: str, length: int) -> str:
    return hashlib.sha256(id_.encode(errors="replace")).hexdigest()[:length]


def _with_ids(messages: Messages, form: Callable[[str], str]) -> Messages:
    """Return the chat with every id in `form`; a result without an id takes its call's id."""
    named: Messages = []
    called: list[str] = []  # ids of the last calls
    num_results = 0
    for rank, message in enumerate(messages):
        if calls := calls_of(message):
            called = [call.get("id") or f"{rank}.{place}" for place, call in enumerate(calls)]
            num_results = 0
            ids = [{**call, "id": form(id_)} for call, id_ in zip(calls, called, strict=True)]
            named.append({**message, "tool_calls": ids})
        elif message["role"] == "tool":
            own = called[num_results] if num_results < len(called) else str(rank)
            named.append({**message, "tool_call_id": form(message.get("tool_call_id") or own)})
            num_results += 1
        else:
            named.append(message)
    return named


def named_results(messages: Messages) -> Messages:
    """Give each result the name of the function that was called."""
    named: Messages = []
    names: dict[object, str] = {}
    last = "unknown"
    for message in messages:
        for call in calls_of(message):
            last = names[call.get("id")] = call["function"]["name"]
        is_nameless = message["role"] == "tool" and not message.get("name")
        name = names.get(message.get("tool_call_id"), last)
        named.append({**message, "name": name} if is_nameless else message)
    return named


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

    So do templates that show a system message in a last user's turn alone, and the turns before keep their tokens.
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
        _without(message, "content") | dict.fromkeys(_TEXTS, _joined([message["thinking"], message["content"]]))
        if calls_of(message) and message.get("thinking") and message.get("content")
        else message
        for message in messages
    ]


def harmony_as_fields(messages: Messages) -> Messages:
    """Split an answer with harmony's marks, which some clients send back unread, into its thoughts and its text."""
    return [_without_harmony(message) if message["role"] == "assistant" else message for message in messages]


def _without_harmony(message: Message) -> Message:
    fields = {name: _harmony_messages(message[name]) for name in ("content", *_TEXTS) if _is_harmony(message.get(name))}
    plain = {name: _joined([text for _, text in parts]) for name, parts in fields.items()}
    if content := fields.get("content"):
        plain["content"] = _joined([text for channel, text in content if channel != "analysis"])
        if thought := _joined([text for channel, text in content if channel == "analysis"]):
            plain |= dict.fromkeys(_TEXTS, thought)
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


def whole_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools with a description and parameters each, which templates write without asking for them."""
    return [{**tool, "function": _whole(tool["function"])} for tool in tools]


def _whole(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "required": [], **(function.get("parameters") or {})}
    return {"description": "", **function, "parameters": parameters}

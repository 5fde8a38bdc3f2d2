"""Changes of the calls in a chat and of their results, for templates that refuse or lose them; see `chat_repairs`."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from router.tokenizer.content_parts import Message, with_written_calls, written_result

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
Messages = list[Message]
_NO_RESULT = "[no result]"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def without(message: Message, *names: str) -> Message:
    """Return the message less some of its fields."""
    return {key: value for key, value in message.items() if key not in names}


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of a message; none for one that has no calls."""
    return message.get("tool_calls") or []


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
        split.append(first if rank == 0 else {**without(first, *THOUGHTS), "content": ""})
        if waiting := places[call.get("id")] or places[None]:
            taken.add(waiting[0])
            split.append(results[waiting.popleft()])
    return [*split, *(result for place, result in enumerate(results) if place not in taken)]


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


def whole_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools with a description and parameters each, which templates write without asking for them."""
    return [{**tool, "function": _whole(tool["function"])} for tool in tools]


def _whole(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "required": [], **(function.get("parameters") or {})}
    return {"description": "", **function, "parameters": parameters}

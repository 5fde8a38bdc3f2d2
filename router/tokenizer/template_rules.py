"""The changes that a chat needs before a model's template takes it and shows all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from enum import StrEnum
from functools import partial
from typing import Any

from router.tokenizer import call_repairs as calls
from router.tokenizer import chat_repairs as repairs
from router.tokenizer.call_repairs import Messages
from router.tokenizer.chat_repairs import Repair


class Rule(StrEnum):
    """One change, in the words of `outrider check`; they are made in this order."""

    HARMONY_AS_FIELDS = "an answer must come without harmony's marks: it is split into its thoughts and its text"
    CONTENT = "an assistant's message must have a content: an empty one is added"
    SYSTEM_FOR_TOOLS = "tools are shown in a system message alone: an empty one is added"
    RESULTS_AFTER_CALLS = "results must follow their calls: they are moved there"
    CALLS_AS_TEXT = "calls and results are not shown: they are written as text, in Hermes's form"
    ORPHANS_AS_TEXT = "results must follow calls: one without a call is written as a user's text"
    RESULTS_FOR_CALLS = "calls must have results: a note replaces a missing one"
    ONE_CALL = "a message takes one call: several become a message each, with their results"
    ARGUMENTS_AS_TEXT = "arguments must be text"
    ARGUMENTS_AS_OBJECTS = "arguments must be an object: a text that was cut is put into one"
    RESULT_NAMES = "results need the name of their function: it is added"
    SHORT_IDS = "ids of calls must have nine letters or digits: others are replaced"
    UNIQUE_IDS = "ids of calls must differ: a missing or repeated one is replaced"
    IDS_OF_FUNCTIONS = "calls are shown by their ids alone: these name the function, as functions.f:0"
    LONG_IDS = "ids of calls must begin with call_: others are replaced"
    ONE_SYSTEM = "one system message is taken: those at the beginning are joined"
    LATE_SYSTEM_AS_USER = "a system message must be first: a later one becomes a user's turn at its place"
    NO_SYSTEM = "system messages are not taken: their text goes before the first user's"
    SYSTEM_IN_LAST_USER = "a system message is shown before a user's turn at the end alone: it goes before the last one"
    TEXT_BEFORE_CALLS = "the text of a message with calls is not shown: it becomes a message before them"
    TEXT_BEFORE_ANSWERED_CALLS = (
        "the text of a message with calls is not shown after a later answer: it becomes a message then"
    )
    TEXT_INTO_THOUGHT = "a text and a thought are refused in a message with calls: the text is added to the thought"
    NO_EMPTY_ASSISTANT = "an assistant's message must not be empty: an empty one is left out"
    NO_EMPTY_SYSTEM = "a system message must not be empty: an empty one is left out"
    NO_EMPTY_USER = f"a user's turn must not be empty: an empty one becomes {repairs.GO_ON!r}"
    NO_EMPTY_RESULT = "a result must not be empty: a note replaces an empty one"
    USER_BEFORE_CALLS = f"calls cannot be first: a user's {repairs.GO_ON!r} comes before them"
    USER_FIRST = f"a user's turn must be first: {repairs.GO_ON!r} is added"
    ALTERNATING = "turns must alternate: neighbors of one role are joined"
    ALTERNATING_AROUND_TOOLS = (
        "turns must alternate, around calls too: neighbors of one role are joined, or "
        f"{repairs.YES!r} or {repairs.GO_ON!r} comes between"
    )
    TEXT_BESIDE_CALLS = "an assistant's text before its calls must be in their message: it is joined to them"
    NO_TEXT_IS_NONE = "calls are shown in messages without content alone: an empty content becomes null"
    NO_TOOLS_IS_A_LIST = "a chat without tools must have an empty list of them"
    USER_LAST = f"an assistant's text cannot be last: a user's {repairs.GO_ON!r} is added"
    CONTENT_AS_PARTS = "contents must be lists of parts"


_REPAIRS: dict[Rule, Repair] = {
    Rule.HARMONY_AS_FIELDS: repairs.harmony_as_fields,
    Rule.CONTENT: repairs.fill_contents,
    Rule.SYSTEM_FOR_TOOLS: repairs.system_for_tools,
    Rule.RESULTS_AFTER_CALLS: calls.results_after_calls,
    Rule.CALLS_AS_TEXT: calls.calls_as_text,
    Rule.ORPHANS_AS_TEXT: calls.orphans_as_text,
    Rule.RESULTS_FOR_CALLS: calls.results_for_calls,
    Rule.ONE_CALL: calls.one_call_each,
    Rule.ARGUMENTS_AS_TEXT: calls.arguments_as_text,
    Rule.ARGUMENTS_AS_OBJECTS: calls.arguments_as_objects,
    Rule.RESULT_NAMES: calls.named_results,
    Rule.SHORT_IDS: calls.short_ids,
    Rule.UNIQUE_IDS: calls.unique_ids,
    Rule.IDS_OF_FUNCTIONS: calls.ids_of_functions,
    Rule.LONG_IDS: calls.long_ids,
    Rule.ONE_SYSTEM: repairs.one_system,
    Rule.LATE_SYSTEM_AS_USER: repairs.late_systems_as_users,
    Rule.NO_SYSTEM: repairs.no_system,
    Rule.SYSTEM_IN_LAST_USER: repairs.system_in_last_user,
    Rule.TEXT_BEFORE_CALLS: repairs.text_before_calls,
    Rule.TEXT_BEFORE_ANSWERED_CALLS: partial(repairs.text_before_calls, is_answered=True),
    Rule.TEXT_INTO_THOUGHT: repairs.text_into_thought,
    Rule.NO_EMPTY_ASSISTANT: repairs.no_empty_assistant,
    Rule.NO_EMPTY_SYSTEM: repairs.no_empty_system,
    Rule.NO_EMPTY_USER: repairs.no_empty_user,
    Rule.NO_EMPTY_RESULT: repairs.no_empty_result,
    Rule.USER_BEFORE_CALLS: partial(repairs.user_first, is_for_calls=True),
    Rule.USER_FIRST: repairs.user_first,
    Rule.ALTERNATING: repairs.alternating,
    Rule.ALTERNATING_AROUND_TOOLS: partial(repairs.alternating, is_around_tools=True),
    Rule.TEXT_BESIDE_CALLS: repairs.joined_to_calls,
    Rule.NO_TEXT_IS_NONE: repairs.no_text_is_none,
    Rule.USER_LAST: repairs.user_last,
    Rule.CONTENT_AS_PARTS: repairs.as_parts,
}


def adapt(rules: Set[Rule], messages: Sequence[Mapping[str, Any]], *, is_continued: bool = False) -> Messages:
    """Return the chat as a template with these rules takes it; `is_continued`: the model continues the last message.

    Without a rule a chat stays as it is.
    """
    adapted = [dict(message) for message in messages]
    for rule, repair in _REPAIRS.items():
        if rule in rules and not (is_continued and rule is Rule.USER_LAST):
            adapted = repair(adapted)
    return adapted


# A chat that any template of texts takes: a user's and an assistant's turns in turn, a user's first and last.
PLAINEST = frozenset(
    {
        Rule.CONTENT,
        Rule.RESULTS_AFTER_CALLS,
        Rule.CALLS_AS_TEXT,
        Rule.ORPHANS_AS_TEXT,
        Rule.LATE_SYSTEM_AS_USER,
        Rule.NO_SYSTEM,
        Rule.NO_EMPTY_ASSISTANT,
        Rule.NO_EMPTY_USER,
        Rule.USER_FIRST,
        Rule.ALTERNATING,
        Rule.USER_LAST,
    }
)

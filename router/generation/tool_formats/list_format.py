"""Calls as a list of JSON objects: Mistral's older form, Cohere's actions, Granite's, Nemotron's."""

from __future__ import annotations

import json
from dataclasses import dataclass

from router.generation.tool_formats.argument_value import arguments_in
from router.generation.tool_formats.tool_format import literal
from router.generation.tool_formats.whole_format import Calls, WholeFormat
from router.requests.tools import Function, ToolUse


@dataclass(frozen=True, slots=True)
class ListFormat(WholeFormat):
    """`[{"name": "f", "arguments": {...}}]` after `begin`, and before `end` if the form has one."""

    brackets: tuple[str, str] = ("[", "]")

    @property
    def _free_answer(self) -> str:
        """The rule of an answer without calls."""
        return "TEXT"

    def _calls(self, use: ToolUse) -> str:
        return f"{self._mark(self.begin)} {self._list(use)}"

    def _calls_in_text(self, use: ToolUse) -> str:
        return f"{self._free_answer} | begin {self._list(use)}"

    def _list(self, use: ToolUse) -> str:
        more = f"({literal(self.separator)} call)*" if use.is_parallel else ""
        opening, closing = map(literal, self.brackets)
        return f"{opening} call {more} {closing} {self._mark(self.end)}".strip()


@dataclass(frozen=True, slots=True)
class ActionFormat(ListFormat):
    """Cohere's list, whose entries have other key names and a number; an answer is between `answer_marks`."""

    answer_marks: tuple[tuple[str, str], ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (*super(ActionFormat, self).marks, *self.strays)

    @property
    def strays(self) -> tuple[str, ...]:
        return tuple(mark for pair in self.answer_marks for mark in pair)

    @property
    def answer(self) -> str:
        return self._between_marks("answer")

    @property
    def _free_answer(self) -> str:
        return self._between_marks("TEXT")

    def _between_marks(self, rule: str) -> str:
        pairs = (pair for pair in self.answer_marks if pair[0] in self.token_ids)
        return " | ".join([rule, *(f"{self._mark(opening)} {rule} {self._mark(close)}" for opening, close in pairs)])

    def _head(self, function: Function) -> str:
        opening = literal('{"tool_call_id": "')
        name = literal(f'", "tool_name": {json.dumps(function.name)}, "{self.arguments_key}": ')
        return f"{opening} /[0-9]{{1,3}}/ {name}"


def read_list(text: str) -> Calls:
    """Return the calls in a list of JSON objects, or in consecutive objects."""
    calls: Calls = []
    for entry in _entries(text):
        match entry:
            case {"name": str(name), **rest}:
                arguments = arguments_in(rest.get("arguments"))
            case {"tool_name": str(name), **rest}:
                arguments = arguments_in(rest.get("parameters"))
            case _:
                raise ValueError("an entry is no call")
        if arguments is None:
            raise ValueError("a call's arguments are no object")
        calls.append((name, arguments))
    return calls


def _entries(text: str) -> list[object]:
    entries: list[object] = []
    decoder = json.JSONDecoder()
    rest = text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        entries += value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip()
    return entries


MISTRAL_LIST = ListFormat(
    "mistral_list", "[TOOL_CALLS]", "", ", ", arguments_key="arguments", read=read_list, id_length=9
)
GRANITE = ListFormat("granite", "<|tool_call|>", "", ", ", arguments_key="arguments", read=read_list)
NEMOTRON = ListFormat("nemotron", "<TOOLCALL>", "</TOOLCALL>", ", ", arguments_key="arguments", read=read_list)
TOOL_CALLS = ListFormat("tool_calls", "<tool_calls>", "</tool_calls>", ", ", arguments_key="arguments", read=read_list)
COHERE = ActionFormat(
    "cohere",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    ",\n    ",
    arguments_key="parameters",
    read=read_list,
    brackets=("[\n    ", "\n]"),
    answer_marks=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
)

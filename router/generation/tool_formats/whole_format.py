"""Calls that can be read only once they are complete: lists of JSON objects, and bases of other such formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from router.generation.tool_formats.argument_value import argument_value, arguments_in, properties
from router.generation.tool_formats.tool_format import NAME, BodyReader, BodyStep, ToolFormat, literal
from router.requests.tools import Function, ToolUse

START, CHANNEL, MESSAGE, END, CALL_END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
END_MARKS = (START, END, CALL_END, "<|return|>")
_CONSTRAIN = "<|constrain|>"
_COMMENTARY = "commentary to=functions."
CALL_BEGIN = CHANNEL + _COMMENTARY


@dataclass(frozen=True, slots=True)
class HarmonyFormat(ToolFormat):
    """A call is the last message of an answer, after its thoughts and its text.

    Its grammars cover the whole answer with its thoughts, and its marks are tokens.
    """

    @property
    def marks(self) -> tuple[str, ...]:
        return (START, CHANNEL, MESSAGE, END, _CONSTRAIN)

    @property
    def covers_thoughts(self) -> bool:
        return True

    @property
    def answer(self) -> str:
        return f"step* {self._head_of('final')} answer"

    def _calls(self, use: ToolUse) -> str:
        return "step* call"

    def _calls_in_text(self, use: ToolUse) -> str:
        return f"step* (call | {self._head_of('final')} TEXT)"

    def _head(self, function: Function) -> str:
        kind = f'(" json" | " " {self._mark(_CONSTRAIN)} "json")?'
        return f"{self._mark(CHANNEL)} {literal(_COMMENTARY + function.name)} {kind} {self._mark(MESSAGE)}"

    def _text_rules(self) -> list[str]:
        thought_or_text = f"({self._head_of('analysis')} | {self._head_of('commentary')}) TEXT"
        return ["TEXT: /(.|\\n)*/", f'step: {thought_or_text} {self._mark(END)} {self._mark(START)} "assistant"']

    def _head_of(self, channel: str) -> str:
        return f"{self._mark(CHANNEL)} {literal(channel)} {self._mark(MESSAGE)}"


HARMONY = HarmonyFormat("harmony", CALL_BEGIN, CALL_END, "", (NAME, MESSAGE))


Calls = list[tuple[str, Mapping[str, object]]]
_BRACKETS = {"]": "[", ")": "(", "}": "{"}


@dataclass(frozen=True, slots=True)
class WholeFormat(ToolFormat):
    """Calls between `begin` and `end`, or, without an `end`, up to the bracket that closes the first.

    `read` returns the calls in a body; it raises ValueError for a text that has none. Without a `begin` an
    answer that opens with a bracket is calls and nothing else. With `brackets` a grammar has all calls in one list, as
    in `[{"name": "f", "arguments": {...}}]` or `[f(a=1), g()]`.
    """

    read: Callable[[str], Calls] = lambda text: []
    quotes: str = '"'
    brackets: tuple[str, str] | None = None

    @property
    def opening(self) -> str:
        return "["

    def body(self, tools: Mapping[str, object], *, has_begin: bool = True) -> BodyReader:
        return WholeBody(self, tools).read

    @property
    def _free_answer(self) -> str:
        """The rule of an answer without calls, next to a list of calls."""
        return "TEXT"

    def _calls(self, use: ToolUse) -> str:
        if self.brackets is None:
            return super(WholeFormat, self)._calls(use)
        return f"{self._mark(self.begin)} {self._list(use)}".strip()

    def _calls_in_text(self, use: ToolUse) -> str:
        if self.brackets is None:
            return super(WholeFormat, self)._calls_in_text(use)
        if not self.begin:
            return f"{self._calls(use)} | /\\s*[^\\[\\s](.|\\n)*/"
        return f"{self._free_answer} | begin {self._list(use)}"

    def _list(self, use: ToolUse) -> str:
        more = f"({literal(self.separator)} call)*" if use.is_parallel else ""
        opening, closing = map(literal, self.brackets or ("", ""))
        return f"{opening} call {more} {closing} {self._mark(self.end)}".strip()


class WholeBody:
    """Reads the calls of one body."""

    def __init__(self, format_: WholeFormat, tools: Mapping[str, object]) -> None:
        self._format = format_
        self._tools = tools
        self._extent = BracketExtent(format_.quotes)
        self._num_scanned = 0

    def read(self, text: str) -> BodyStep | None:
        end = self._end(text)
        if end is None:
            return None
        try:
            calls = self._format.read(text[:end])
            pieces = [(_json(self._typed(name, arguments)), name) for name, arguments in calls]
        except (ValueError, RecursionError, MemoryError):
            calls, pieces = [], []
        is_call = bool(calls) and (bool(self._format.begin) or all(name in self._tools for name, _ in calls))
        return BodyStep(end + len(self._format.end), tuple(pieces), is_done=True, is_call=is_call)

    def _typed(self, name: str, arguments: Mapping[str, object]) -> dict[str, object]:
        """Convert quoted arguments to the types in their schemas: some models quote every value."""
        schemas = properties(self._tools.get(name))
        return {
            key: argument_value(value, schemas.get(key)) if isinstance(value, str) else value
            for key, value in arguments.items()
        }

    def _end(self, text: str) -> int | None:
        if self._format.end:
            end = text.find(self._format.end, max(self._num_scanned - len(self._format.end), 0))
            self._num_scanned = len(text)
            return None if end < 0 else end
        return self._extent.end_in(text)


class BracketExtent:
    """Finds the bracket that closes the first one of a text, skipping texts in quotes."""

    def __init__(self, quotes: str) -> None:
        self._quotes = quotes
        self._open: list[str] = []
        self._quote = ""
        self._is_escaped = False
        self._num_scanned = 0

    def end_in(self, text: str) -> int | None:
        """Return the end in a text that has grown since the last call; None if it has not arrived."""
        num_before, self._num_scanned = self._num_scanned, len(text)
        end_of_new = self.feed(text[num_before:])
        return None if end_of_new is None else num_before + end_of_new

    def feed(self, text: str) -> int | None:
        """Return the number of characters of `text` up to the end; None if it is not in `text`."""
        for index, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif self._follow(character):
                return index + 1
        return None

    def _follow(self, character: str) -> bool:
        """Take a character outside quotes; True at the end: all is closed, or no call can follow."""
        if character in self._quotes:
            self._quote = character
        elif character in "[({":
            self._open.append(character)
        elif character in _BRACKETS:
            if not self._open or self._open.pop() != _BRACKETS[character]:
                return True  # mismatched brackets: the reader will find no call
            return not self._open
        elif not self._open and not character.isspace():
            return True
        return False


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate cannot be sent: UnicodeEncodeError is a ValueError
    return text


@dataclass(frozen=True, slots=True)
class ActionFormat(WholeFormat):
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


_JSON_LIST = WholeFormat("", "", "", ", ", arguments_key="arguments", read=read_list, brackets=("[", "]"))
MISTRAL_LIST = replace(_JSON_LIST, name="mistral_list", begin="[TOOL_CALLS]", id_length=9)
GRANITE = replace(_JSON_LIST, name="granite", begin="<|tool_call|>")
NEMOTRON = replace(_JSON_LIST, name="nemotron", begin="<TOOLCALL>", end="</TOOLCALL>")
TOOL_CALLS = replace(_JSON_LIST, name="tool_calls", begin="<tool_calls>", end="</tool_calls>")
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

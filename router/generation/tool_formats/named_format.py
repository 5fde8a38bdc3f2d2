"""Calls with comma-separated named arguments: Python's and Gemma's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from router.generation.tool_formats.argument_value import is_text, properties, read_python, with_definitions
from router.generation.tool_formats.tool_format import arguments_schema, json_rule, literal
from router.generation.tool_formats.whole_format import Calls, WholeFormat, read_list
from router.requests.tools import NAME_PATTERN, ToolUse

_HEAD = re.compile(rf"\s*call:\s*({NAME_PATTERN})\s*(?=\{{|$)")
_KEY = re.compile(r'\s*([^\s:{}\[\],"<]+)\s*:')
_BARE = re.compile(r"[^,{}\[\]]*")


def read_gemma_call(text: str, quote: str) -> list[tuple[str, Mapping[str, object]]]:
    """Return the call in `text`. Raises ValueError for any other text."""
    head = _HEAD.match(text)
    if head is None:
        raise ValueError("it has no head")
    if head.end() == len(text):
        return [(head[1], {})]
    reader = _ValueParser(text, head.end(), quote)
    arguments = reader.value(0)
    if not isinstance(arguments, dict) or text[reader.place :].strip():
        raise ValueError("something follows the arguments")
    return [(head[1], arguments)]


class _ValueParser:
    """Reads one value after another from a text."""

    def __init__(self, text: str, place: int, quote: str) -> None:
        self.place = place
        self._text = text
        self._quote = quote

    def value(self, depth: int) -> object:
        if depth > 64:
            raise ValueError("it is nested too deeply")
        self._skip()
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._items(depth)
        if self._text.startswith((self._quote, '"'), self.place):
            return self._quoted()
        return self._bare()

    def _object(self, depth: int) -> dict[str, object]:
        entries: dict[str, object] = {}
        while not self._ends("}"):
            name = self._name()
            entries[name] = self.value(depth + 1)
            self._comma()
        return entries

    def _items(self, depth: int) -> list[object]:
        items = []
        while not self._ends("]"):
            items.append(self.value(depth + 1))
            self._comma()
        return items

    def _name(self) -> str:
        self._skip()
        if self._text.startswith((self._quote, '"'), self.place):
            name = self._quoted()
            self._skip()
            if not self._takes(":"):
                raise ValueError("a name has no colon")
            return name
        key = _KEY.match(self._text, self.place)
        if key is None:
            raise ValueError("a name is missing")
        self.place = key.end()
        return key[1]

    def _quoted(self) -> str:
        if self._takes(self._quote):
            end = self._text.index(self._quote, self.place)
            text, self.place = self._text[self.place : end], end + len(self._quote)
            return text
        value, self.place = json.JSONDecoder().raw_decode(self._text, self.place)
        return str(value)

    def _bare(self) -> object:
        bare = _BARE.match(self._text, self.place)
        word = bare[0].strip() if bare else ""
        if not word:
            raise ValueError("a value is missing")
        self.place += len(bare[0]) if bare else 0
        try:
            value: object = json.loads(word)
        except ValueError:
            return word
        return value

    def _ends(self, bracket: str) -> bool:
        self._skip()
        if self.place >= len(self._text):
            raise ValueError("a bracket is missing")
        return self._takes(bracket)

    def _comma(self) -> None:
        self._skip()
        if not self._takes(",") and self._text[self.place : self.place + 1] not in ("}", "]"):
            raise ValueError("a comma is missing")

    def _skip(self) -> None:
        while self._text[self.place : self.place + 1].isspace():
            self.place += 1

    def _takes(self, mark: str) -> bool:
        is_next = self._text.startswith(mark, self.place)
        self.place += len(mark) if is_next else 0
        return is_next


@dataclass(frozen=True, slots=True)
class NamedFormat(WholeFormat):
    """Calls with `call_head`, arguments separated by commas, each named by `key_form`, and `close`.

    In a grammar values are JSON, which every parser accepts in addition to its own form; texts are between `quote`.
    """

    call_head: str = "{}("
    key_form: str = "{}="
    close: str = ")"
    quote: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (*super(NamedFormat, self).marks, *filter(None, [self.quote]))

    def _call_rules(self, use: ToolUse) -> list[str]:
        rules: list[str] = []
        calls = []
        for rank, function in enumerate(use.callable_):
            arguments = self._arguments(rank, arguments_schema(function, use), rules)
            calls.append(f"{literal(self.call_head.format(function.name))} {arguments} {literal(self.close)}")
        return [f"call: {' | '.join(calls)}", *rules, *self._text_rules()]

    def _arguments(self, rank: int, schema: Mapping[str, object], rules: list[str]) -> str:
        """Return the rule of a function's arguments, and add the rules of their values to `rules`."""
        known = properties(schema)
        if not known:
            rules += [f"value_{rank}: {json_rule({}, rules)}", f"KEY_{rank}: /[a-zA-Z_][a-zA-Z0-9_]*/"]
            part = f"KEY_{rank} {literal(self.key_form.format(''))} value_{rank}"
            return f'({part} ("," {part})*)?' if schema.get("additionalProperties") is not False else ""
        parts = {}
        for place, (name, inner) in enumerate(known.items()):
            rules.append(f"value_{rank}_{place}: {self._value(with_definitions(inner, schema), rules)}")
            parts[name] = f"{literal(self.key_form.format(name))} value_{rank}_{place}"
        required = schema.get("required")
        wanted = [name for name in known if isinstance(required, list) and name in required]
        return _in_commas([parts[name] for name in wanted], [parts[name] for name in known if name not in wanted])

    def _value(self, schema: object, rules: list[str]) -> str:
        is_free = is_text(schema) and not (isinstance(schema, Mapping) and ("enum" in schema or "const" in schema))
        if is_free and self.quote in self.token_ids:
            return f"{self._mark(self.quote)} TEXT {self._mark(self.quote)}"
        return json_rule(schema, rules)


def _in_commas(wanted: list[str], optional: list[str]) -> str:
    """Return the rule of a list with all of `wanted` and any of `optional`, in this order."""
    if wanted:
        return " ".join([' "," '.join(wanted), *(f'("," {part})?' for part in optional)])
    choices = [
        " ".join([part, *(f'("," {other})?' for other in optional[rank + 1 :])]) for rank, part in enumerate(optional)
    ]
    return f"({' | '.join(choices)})?"


@dataclass(frozen=True, slots=True)
class PythonicFormat(NamedFormat):
    """`[f(a=1), g()]`."""

    def _calls(self, use: ToolUse) -> str:
        return f"{self._mark(self.begin)} {self._list(use)} {self._mark(self.end)}".strip()

    def _calls_in_text(self, use: ToolUse) -> str:
        if not self.begin:
            return f"{self._calls(use)} | /\\s*[^\\[\\s](.|\\n)*/"
        return f"TEXT | begin {self._list(use)} {self._mark(self.end)}"

    def _list(self, use: ToolUse) -> str:
        more = f"({literal(self.separator)} call)*" if use.is_parallel else ""
        return f'"[" call {more} "]"'


def read_list_or_python(text: str) -> Calls:
    """Return the calls in a text that may be of either form."""
    try:
        return read_list(text)
    except ValueError:
        return read_python(text)


# Llama 4 and its kin write a bare list; LFM2 marks it, with JSON in its older template; OLMo 3 writes one in a line.
PYTHONIC = PythonicFormat("pythonic", "", "", ", ", read=read_python, quotes="\"'")
LFM2 = PythonicFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", ", ", read=read_list_or_python)
OLMO = PythonicFormat("olmo", "<function_calls>", "</function_calls>", ", ", read=read_python)
GEMMA = NamedFormat(
    "gemma",
    "<|tool_call>",
    "<tool_call|>",
    "",
    read=partial(read_gemma_call, quote='<|"|>'),
    call_head="call:{}{{",
    key_form="{}:",
    close="}",
    quote='<|"|>',
)
FUNCTION_GEMMA = replace(
    GEMMA,
    name="function_gemma",
    begin="<start_function_call>",
    end="<end_function_call>",
    read=partial(read_gemma_call, quote="<escape>"),
    quote="<escape>",
)

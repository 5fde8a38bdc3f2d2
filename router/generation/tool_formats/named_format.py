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
_COLON = re.compile(r"\s*:")
_BARE = re.compile(r"[^,{}\[\]]+")


def read_gemma_call(text: str, quote: str) -> list[tuple[str, Mapping[str, object]]]:
    """Return the call in `text`. Raises ValueError for any other text."""
    head = _HEAD.match(text)
    if head is None:
        raise ValueError("it has no head")
    if head.end() == len(text):
        return [(head[1], {})]
    arguments: dict[str, object] = json.loads(_as_json(text[head.end() :], quote))
    return [(head[1], arguments)]


def _as_json(text: str, quote: str) -> str:
    """Return an object in Gemma's syntax as JSON: names and bare words get quotes, a last comma is left out.

    What is wrong in Gemma's syntax becomes wrong in JSON, or raises ValueError.
    """
    pieces: list[str] = []
    brackets: list[str] = []
    place = 0
    while place < len(text):
        mark = text[place]
        if mark in "{}[],":
            if mark in "{[":
                brackets.append(mark)
            elif mark != ",":
                brackets = brackets[:-1]
                if pieces[-1] == "," and pieces[-2] not in ("{", "["):
                    pieces.pop()
            pieces.append(mark)
        if mark.isspace() or mark in "{}[],":
            place += 1
            continue
        is_name = brackets[-1:] == ["{"] and pieces[-1] in ("{", ",")
        piece, place = _name(text, place, quote) if is_name else _value(text, place, quote)
        pieces.append(piece)
        if len(brackets) > 64:
            raise ValueError("it is nested too deeply")
    return "".join(pieces)


def _name(text: str, place: int, quote: str) -> tuple[str, int]:
    """Return the name at `place` with its colon, and the place after it."""
    if text.startswith((quote, '"'), place):
        name, place = _value(text, place, quote)
        colon = _COLON.match(text, place)
    else:
        colon = _KEY.match(text, place)
        name = json.dumps(colon[1]) if colon else ""
    if colon is None:
        raise ValueError("a name with a colon is missing")
    return f"{name}:", colon.end()


def _value(text: str, place: int, quote: str) -> tuple[str, int]:
    """Return the text in quotes or the bare word at `place`, and the place after it."""
    if text.startswith(quote, place):
        start = place + len(quote)
        end = text.index(quote, start)
        return json.dumps(text[start:end]), end + len(quote)
    if text[place] == '"':
        value, end = json.JSONDecoder().raw_decode(text, place)
        return json.dumps(value), end
    bare = _BARE.match(text, place)
    assert bare is not None
    word = bare[0].strip()
    try:
        json.loads(word)
    except ValueError:
        word = json.dumps(word)
    return word, bare.end()


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


def read_list_or_python(text: str) -> Calls:
    """Return the calls in a text that may be of either form."""
    try:
        return read_list(text)
    except ValueError:
        return read_python(text)


# Llama 4 and its kin write a bare list; LFM2 marks it, with JSON in its older template; OLMo 3 writes one in a line.
PYTHONIC = NamedFormat("pythonic", "", "", ", ", read=read_python, quotes="\"'", brackets=("[", "]"))
LFM2 = replace(
    PYTHONIC,
    name="lfm2",
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    read=read_list_or_python,
    quotes='"',
)
OLMO = replace(PYTHONIC, name="olmo", begin="<function_calls>", end="</function_calls>", quotes='"')
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

"""Calls with comma-separated named arguments: Python's and Gemma's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from router.generation.tool_formats.argument_value import is_text, properties, with_definitions
from router.generation.tool_formats.gemma_value import read_gemma_call
from router.generation.tool_formats.list_format import read_list
from router.generation.tool_formats.python_calls import read_python
from router.generation.tool_formats.tool_format import arguments_schema, json_rule, literal
from router.generation.tool_formats.whole_format import Calls, WholeFormat
from router.requests.tools import ToolUse


@dataclass(frozen=True, slots=True)
class NamedFormat(WholeFormat):
    """Calls of `call_head`, arguments with their names by `key_form`, separated by commas, and `close`.

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

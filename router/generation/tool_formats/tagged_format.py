"""Calls with a mark around each argument, as XML has them: Qwen3-Coder's, GLM's, MiniMax's, DeepSeek's DSML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from router.generation.tool_formats.argument_value import (
    argument_value,
    is_text,
    properties,
    types_of,
    with_definitions,
)
from router.generation.tool_formats.tool_format import (
    LONGEST_HEAD,
    NAME,
    BodyReader,
    BodyStep,
    ToolFormat,
    arguments_schema,
    json_rule,
    literal,
    num_held,
)
from router.requests.tools import NAME_PATTERN, Function, ToolUse

KEY, IS_TEXT = "{key}", "{is_text}"
_TEXT: object = {"type": "string"}
_ANY_VALUE: object = {"type": ["object", "array", "number", "boolean", "null", "string"]}
_LINE_END = '"\\n"?'  # newer models leave it out
_NO_CALL = BodyStep(0, is_done=True, is_call=False)


@dataclass(frozen=True, slots=True)
class TaggedFormat(ToolFormat):
    """Calls with each argument between `key`, where KEY is the parameter's name, and `value_end`.

    A text is written as it is, anything else as JSON. IS_TEXT in the key tags a text as true; without it the
    parameter's schema decides. `body_end` ends the arguments if `end` has an outer meaning.
    `is_padded`: each value is between line breaks. `can_begin_bare`: models leave out `begin`.
    """

    key: tuple[str, ...] = ()
    value_end: str = ""
    body_end: str = ""
    is_padded: bool = False
    can_begin_bare: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (*super(TaggedFormat, self).marks, *self.key, self.value_end, self.last)

    @property
    def strays(self) -> tuple[str, ...]:
        outer = (self.end,) if self.body_end else ()
        return (*super(TaggedFormat, self).strays, *outer)

    @property
    def bare_begin(self) -> str:
        return self.head[0].strip() if self.can_begin_bare else ""

    @property
    def last(self) -> str:
        """The mark after the arguments of a call."""
        return self.body_end or self.end

    def _pattern_of(self, head: tuple[str, ...]) -> re.Pattern[str]:
        return re.compile(rf"\s*{_pattern(head)}\s*(?={re.escape(self.key[0])}|{re.escape(self.last)})")

    @property
    def key_pattern(self) -> re.Pattern[str]:
        """The beginning of an argument, up to its value; its group is the parameter's name."""
        return re.compile(_pattern(self.key))

    def body(self, tools: Mapping[str, object], *, has_begin: bool = True) -> BodyReader:
        return TaggedBody(self, tools, self._pattern_of(self.head if has_begin else self.head[1:])).read

    @property
    def _section_gap(self) -> str:
        return _LINE_END

    def _call_rules(self, use: ToolUse) -> list[str]:
        rules: list[str] = []
        calls = []
        for rank, function in enumerate(use.callable_):
            schema = arguments_schema(function, use)
            calls.append(f"{self._head(function)} {self._arguments(rank, schema, rules)}".strip())
        newline = literal("\n" if self.body_end else "")
        close = f"{self._mark(self.body_end)} {newline}".strip()
        text = ["TEXT: /(.|\\n)*/"] if not self.begin else []
        value = f"value[lazy]: TEXT {literal(self._padding + self.value_end)}"
        if self._has_token(self.value_end):
            value = f"value: {self._text_before(self.value_end)}"
        rules += [value, 'KEY: /[^<>"\\n]{1,128}/']
        return [f"call: ({' | '.join(calls)}) {close}", *rules, *text, *self._text_rules()]

    @property
    def _padding(self) -> str:
        return "\n" if self.is_padded else ""

    def _arguments(self, rank: int, schema: Mapping[str, object], rules: list[str]) -> str:
        """Return the rule of a function's arguments, and add the rules of their values to `rules`."""
        known = properties(schema)
        if not known:
            return f"({self._key('KEY')} value {_LINE_END})*" if _is_open(schema) else ""
        required = schema.get("required")
        wanted = required if isinstance(required, list) else []
        parts = []
        for place, (name, inner) in enumerate(known.items()):
            value = f"value_{rank}_{place}"
            key = self._key(literal(name), is_text(inner))
            part = f"{key} {self._value(value, with_definitions(inner, schema), rules)} {_LINE_END}"
            parts.append(part if name in wanted else f"({part})?")
        return " ".join(parts)

    def _value(self, rule: str, schema: object, rules: list[str]) -> str:
        """Return the rule of one value with its end."""
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        if is_text(schema) and not isinstance(choices, list):
            return "value"
        if is_text(schema):
            texts = " | ".join(literal(str(choice)) for choice in choices or ())
            rules.append(f"{rule}: {texts}")
        else:
            rules.append(f"{rule}: {json_rule(schema, rules)}")
        return f"{rule} {literal(self._padding)} {self._mark(self.value_end)}"

    def _key(self, name: str, has_text: bool = True) -> str:
        known = {KEY: name, IS_TEXT: literal(str(has_text).lower())}
        parts = " ".join(known.get(part) or (self._mark(part) if part.strip() else _LINE_END) for part in self.key)
        return f"{parts} {literal(self._padding)}".strip()

    def _head(self, function: Function) -> str:
        after = "" if self.head[-1].endswith("\n") else _LINE_END
        return f"{super(TaggedFormat, self)._head(function)} {after}"


class TaggedBody:
    """Reads one call; a text of its arguments is passed on as it grows."""

    def __init__(self, format_: TaggedFormat, tools: Mapping[str, object], head: re.Pattern[str]) -> None:
        self._format = format_
        self._tools = tools
        self._head = head
        self._next: BodyReader = self._read_head
        self._schemas: Mapping[str, object] = {}
        self._schema: object = None  # of the value that is read
        self._num_arguments = 0
        self._is_fresh = False  # no character of the value has been read

    def read(self, text: str) -> BodyStep | None:
        return self._next(text)

    def _read_head(self, text: str) -> BodyStep | None:
        head = self._head.match(text)
        if head is None:
            is_broken = self._format.last in text or self._format.end in text or len(text) > LONGEST_HEAD
            return _NO_CALL if is_broken else None
        self._next = self._read_between
        self._schemas = properties(self._tools.get(head[1]))
        return BodyStep(head.end(), (("", head[1]),))

    def _read_between(self, text: str) -> BodyStep | None:
        key, end = self._format.key_pattern.search(text), text.find(self._format.last)
        if key is not None and (end < 0 or key.start() < end):
            opening = "{" if self._num_arguments == 0 else ", "
            self._num_arguments += 1
            name = key[1].strip()
            self._schema = self._schema_of(self._schemas.get(name), key.groupdict().get("is_text"))
            self._is_fresh = True
            self._next, quote = (self._read_text, '"') if is_text(self._schema) else (self._read_value, "")
            return BodyStep(key.end(), ((f"{opening}{_json(name)}: {quote}", None),))
        if end < 0:
            return None
        closing = "}" if self._num_arguments else "{}"
        return BodyStep(end + len(self._format.last), ((closing, None),), is_done=True)

    def _schema_of(self, schema: object, text_tag: str | None) -> object:
        """Return the schema for parsing a value; `text_tag` is the key's IS_TEXT, if it has one."""
        if text_tag == "true" and (not types_of(schema) or "string" in types_of(schema)):
            return _TEXT
        return _ANY_VALUE if text_tag == "false" and not types_of(schema) else schema

    def _read_value(self, text: str) -> BodyStep | None:
        end = self._end_of_value(text)
        if end is None:
            return None
        self._next = self._read_between
        value = argument_value(text[:end], self._schema)
        if isinstance(value, str):
            value = self._unpadded(value)
        return BodyStep(end + len(self._format.value_end), ((_json(value), None),))

    def _read_text(self, text: str) -> BodyStep | None:
        end = self._end_of_value(text)
        if end is not None:
            self._next = self._read_between
            piece = f'{_json(self._unpadded(text[:end]))[1:-1]}"'
            return BodyStep(end + len(self._format.value_end), ((piece, None),))
        start = text.find(self._format.value_end)  # which may yet turn out to belong to the text
        num_shown = len(text) - num_held(text, self._format.value_end) if start < 0 else len(text[:start].rstrip())
        if num_shown <= 0:
            return None
        shown = text[:num_shown]
        if self._is_fresh and self._format.is_padded:
            shown = shown.removeprefix("\n")
        self._is_fresh = False
        return BodyStep(num_shown, ((_json(shown)[1:-1], None),))

    def _end_of_value(self, text: str) -> int | None:
        """Return the place of the mark that ends a value: one that another argument or the end of the call follows."""
        followers = (self._format.key[0], self._format.last)
        start = text.find(self._format.value_end)
        while start >= 0:
            after = text[start + len(self._format.value_end) :].lstrip()
            if after.startswith(followers):
                return start
            if any(mark.startswith(after) for mark in followers):
                return None
            start = text.find(self._format.value_end, start + 1)
        return None

    def _unpadded(self, text: str) -> str:
        if not self._format.is_padded:
            return text
        return (text.removeprefix("\n") if self._is_fresh else text).removesuffix("\n")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _pattern(parts: tuple[str, ...]) -> str:
    groups = {NAME: rf"({NAME_PATTERN}?)", KEY: r'([^<>"\n]{1,128}?)', IS_TEXT: "(?P<is_text>true|false)"}
    return "".join(groups.get(part) or r"\s*" + re.escape(part.strip()) for part in parts)


def _is_open(schema: Mapping[str, object]) -> bool:
    return schema.get("additionalProperties") is not False


QWEN_XML = TaggedFormat(
    "qwen_xml",
    "<tool_call>",
    "</tool_call>",
    "\n",
    ("\n<function=", NAME, ">\n"),
    key=("<parameter=", KEY, ">"),
    value_end="</parameter>",
    body_end="</function>",
    is_padded=True,
    can_begin_bare=True,
)
SEED = replace(QWEN_XML, name="seed", begin="<seed:tool_call>", end="</seed:tool_call>", is_padded=False)
GLM = TaggedFormat(
    "glm",
    "<tool_call>",
    "</tool_call>",
    "\n",
    (NAME,),
    key=("<arg_key>", KEY, "</arg_key>", "\n", "<arg_value>"),
    value_end="</arg_value>",
)
MINIMAX = TaggedFormat(
    "minimax",
    '<invoke name="',
    "</invoke>",
    "\n",
    (NAME, '">'),
    sections=("<minimax:tool_call>", "</minimax:tool_call>"),
    key=('<parameter name="', KEY, '">'),
    value_end="</parameter>",
)
_DSML = "｜DSML｜"
DSML = TaggedFormat(
    "dsml",
    f'<{_DSML}invoke name="',
    f"</{_DSML}invoke>",
    "\n",
    (NAME, '">'),
    sections=(f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"),
    core=_DSML,
    key=(f'<{_DSML}parameter name="', KEY, '" string="', IS_TEXT, '">'),
    value_end=f"</{_DSML}parameter>",
)
DSML_V32 = replace(DSML, name="dsml_v32", sections=(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"))

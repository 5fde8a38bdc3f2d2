"""Forms of tool calls in the text of models, and grammars that enforce them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from protos.errors import RequestError
from protos.messages import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from router.requests.json_schema import schema_source
from router.requests.tools import NAME_PATTERN, Function, ToolUse
from router.tokenizer import Tokenizer

NAME, _NUMBER = "{name}", "{number}"
_NAME_FIRST = r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"%s"\s*:\s*(?=\{)'
_BEFORE_ARGUMENTS = r"(?=\{)"
LONGEST_HEAD = 512  # characters, of a call whose end has no mark
_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class BodyStep:
    """A part of the body that has been understood. It ends with the part that is `is_done`.

    Each of `pieces` is a piece of a call's arguments, in JSON, and the name of the call that it begins, if it begins
    one. `is_call` is false where the body turned out to be no call; then nothing of it has been read.
    """

    num_characters: int
    pieces: tuple[tuple[str, str | None], ...] = ()
    is_done: bool = False
    is_call: bool = True


# Reads one body: returns the step from the end of the last one; None if more text is needed.
BodyReader = Callable[[str], BodyStep | None]


def num_held(text: str, mark: str) -> int:
    """Return the length of the end of `text` that may belong to `mark`: white space, and a beginning of the mark."""
    length = next(n for n in range(min(len(mark) - 1, len(text)), -1, -1) if text.endswith(mark[:n]))
    rest = text[: len(text) - length]
    return length + len(rest) - len(rest.rstrip())


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls between `begin` and `end`, each the `head` with the function's name, and its arguments as a JSON object.

    With an `arguments_key`, head and arguments are one JSON object with `name` and that key; an empty `begin` then
    means that the whole answer is calls if its first character is a brace. `sections` enclose all calls. A mark that is
    an added token is in `token_ids`; a mark that contains one has it as its `core`.
    """

    name: str
    begin: str
    end: str
    separator: str
    head: tuple[str, ...] = ()  # NAME is replaced by the function's name, _NUMBER by a number
    arguments_key: str = ""
    optional: str = ""  # a mark and the call's id, optional before the last part of the head
    tail: str = ""  # text between the arguments and `end`
    sections: tuple[str, str] | None = None
    core: str = ""  # a token inside marks
    token_ids: Mapping[str, int] = field(default_factory=dict)
    id_length: int = 0  # characters of a call's id, where the template refuses others

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that are no part of an argument or of an answer."""
        marks = (self.begin, self.end, *self.head, *(self.sections or ()), self.optional, self.core)
        return tuple(filter(None, marks))

    @property
    def strays(self) -> tuple[str, ...]:
        """Marks around calls; they are removed from the text everywhere."""
        return self.sections or ()

    @property
    def bare_begin(self) -> str:
        """The beginning of a call without `begin`; empty where models do not write such."""
        return ""

    def body(self, tools: Mapping[str, object], *, has_begin: bool = True) -> BodyReader | None:
        """Return a reader for arguments that are not JSON; None if they are JSON.

        `tools` are the schemas of the arguments by the functions' names; without `has_begin` it began by `bare_begin`.
        """
        return None

    def call_id(self, head: re.Match[str]) -> str:
        """Return the id of a call: the model's own if the head has one, since its template expects it."""
        if _NUMBER in self.head:
            return head[0].strip().removesuffix(self.head[-1])
        return head.groupdict().get("id") or self.new_call_id()

    def new_call_id(self) -> str:
        """Return an id for a call."""
        return uuid.uuid4().hex[: self.id_length] if self.id_length else f"call_{uuid.uuid4().hex[:24]}"

    @property
    def answer(self) -> str:
        """The rule of an answer instead of calls; the rule `answer` matches its text."""
        return "answer"

    @property
    def covers_thoughts(self) -> bool:
        """True if grammars begin with the thought, not after it."""
        return False

    @property
    def opening(self) -> str:
        """The first character of an answer that is calls, where calls have no mark."""
        return "{"

    @property
    def head_pattern(self) -> re.Pattern[str]:
        """The head of a call, up to the brace of its arguments; its group is the name, in quotes in a JSON object."""
        if self.arguments_key:
            return re.compile(_NAME_FIRST % self.arguments_key)
        groups = {NAME: rf"({NAME_PATTERN}?)", _NUMBER: r"\d{1,6}"}
        parts = [groups.get(part, re.escape(part)) for part in self.head]
        if self.optional:
            parts.insert(-1, rf"(?:{re.escape(self.optional)}(?P<id>\w{{1,64}}))?")
        return re.compile(r"\s*" + "".join(parts) + r"\s*" + _BEFORE_ARGUMENTS)

    @property
    def bare_head_pattern(self) -> re.Pattern[str]:
        """A whole call without arguments, where head and arguments are not one JSON object."""
        head = self.head_pattern.pattern.removesuffix(_BEFORE_ARGUMENTS)
        return re.compile(rf'{head}(?:null|"")?\s*(?:{re.escape(self.tail.strip())})?\s*')

    def with_tokens(self, tokenizer: Tokenizer) -> ToolFormat:
        """Return the format for a model: marks that are added tokens of its tokenizer by their ids.

        Grammars name them so: to llguidance no text is an added token, special or not.
        """
        ids = {mark: tokenizer.token_id(mark) for mark in self.marks}
        added = {mark: id_ for mark, id_ in ids.items() if id_ is not None and tokenizer.is_added(id_)}
        return replace(self, token_ids=added)

    def grammar(self, use: ToolUse, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the output: calls alone where one is required, or else a text, with or without calls.

        `answer` constrains that text, if there may be one; None leaves it free. None where nothing is constrained.
        """
        is_strict = any(function.strict for function in use.callable_) or len(use.callable_) < len(use.tools)
        if use.is_required:
            start = self._calls(use)
        elif answer is not None:
            start = f"{self._calls(use)} | {self.answer}"
        elif is_strict or not use.is_parallel:
            start = self._calls_in_text(use)
        else:
            return None
        rules = [f"start: {start}", *self._call_rules(use)]
        if answer is not None and not use.is_required:
            rules.append(f"answer: %json {answer.source}")
        return Grammar(GrammarKind.GRAMMAR, "%llguidance {}\n" + "\n".join(rules) + "\n", "tools")

    def _calls(self, use: ToolUse) -> str:
        return self._in_section(self._mark(self.sections[0]) if self.sections else "", self._mark(self.begin), use)

    def _calls_in_text(self, use: ToolUse) -> str:
        """Return the rule of a free text; after each beginning of a call, only a valid call may follow."""
        if not self.begin:
            return f"{self._calls(use)} | /\\s*[^{{\\s](.|\\n)*/"
        if self.sections:
            return f"TEXT | {self._in_section('begin', self._mark(self.begin), use)} TEXT"
        call = self._call("begin")
        return f"TEXT | ({call})+ TEXT" if use.is_parallel else f"TEXT | {call}"

    def _in_section(self, opening: str, begin: str, use: ToolUse) -> str:
        call = self._call(begin)
        calls = f"{call} ({literal(self.separator)} {call})*" if use.is_parallel else call
        if self.sections:
            return f"{opening} {self._section_gap} {calls} {self._section_gap} {self._mark(self.sections[1])}"
        return f"{opening} {calls}".strip()

    @property
    def _section_gap(self) -> str:
        """The rule of the gap between calls and the marks around all of them."""
        return ""

    def _call(self, begin: str) -> str:
        newline = literal("\n" if self.begin and self.arguments_key else "")
        return f"{begin} {newline} call {newline} {self._mark(self.end)}".strip()

    def _call_rules(self, use: ToolUse) -> list[str]:
        heads = [f"{self._head(function)} arguments_{rank}" for rank, function in enumerate(use.callable_)]
        arguments: list[str] = []
        for rank, function in enumerate(use.callable_):
            arguments.append(f"arguments_{rank}: {json_rule(arguments_schema(function, use), arguments)}")
        close = literal("}" if self.arguments_key else self.tail)
        return [f"call: ({' | '.join(heads)}) {close}", *arguments, *self._text_rules()]

    def _text_rules(self) -> list[str]:
        """Return the rules of a free text, and of one up to the beginning of calls."""
        if not self.begin:
            return []
        mark = self.sections[0] if self.sections else self.begin
        spelled = f"spelled[lazy]: TEXT {literal(mark)}"  # is read as a call too, so it must begin a valid one
        token = f" | {self._text_before(mark)}" if self._has_token(mark) else ""
        return ["TEXT: /(.|\\n)*/", spelled, f"begin: spelled{token}"]

    def _has_token(self, mark: str) -> bool:
        return mark in self.token_ids or (self.core in self.token_ids and self.core in mark)

    def _text_before(self, mark: str) -> str:
        """Return the rule of a free text up to a mark that has a token, which no text can hold."""
        if mark in self.token_ids:
            return f"TEXT {self._mark(mark)}"
        before, _, after = mark.partition(self.core)
        return f"/(.|\\n)*{_in_pattern(before)}/ <[{self.token_ids[self.core]}]> {literal(after)}"

    def _head(self, function: Function) -> str:
        if self.arguments_key:
            return literal(f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": ')
        known = {NAME: literal(function.name), _NUMBER: "/[0-9]{1,3}/"}
        parts = [known.get(part) or self._mark(part) for part in self.head]
        if self.optional in self.token_ids:
            parts.insert(-1, f"({self._mark(self.optional)} /[a-zA-Z0-9]{{9}}/)?")
        return " ".join(parts)

    def _mark(self, mark: str) -> str:
        if mark in self.token_ids or not self._has_token(mark):
            return f"<[{self.token_ids[mark]}]>" if mark in self.token_ids else literal(mark)
        before, _, after = mark.partition(self.core)
        return f"{literal(before)} <[{self.token_ids[self.core]}]> {literal(after)}"


def arguments_schema(function: Function, use: ToolUse) -> Mapping[str, object]:
    """Return the schema of the arguments: their own if a call is required or the function is strict."""
    return function.schema_ if use.is_required or function.strict else _ANY_ARGUMENTS


def json_rule(schema: object, rules: list[str]) -> str:
    """Return the rule of a value in JSON. Raises RequestError if it and `rules` are too long to compile."""
    rule = f"%json {schema_source('tools', schema)}"
    num_characters = sum(map(len, rules)) + len(rule)
    if num_characters > MAX_GRAMMAR_CHARACTERS:  # the rule of every argument repeats the definitions
        raise RequestError(
            f"the schemas of tools come to {num_characters} characters with their definitions; at most "
            f"{MAX_GRAMMAR_CHARACTERS} are compiled. Offer fewer tools, or leave strict and tool_choice out.",
            param="tools",
        )
    return rule


def _in_pattern(text: str) -> str:
    """Return the text as a pattern of a grammar spells it."""
    return re.escape(text).replace("/", "\\/")


def literal(text: str) -> str:
    """Return the text as a grammar spells it; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n", arguments_key="arguments")
LLAMA = ToolFormat("llama", "", "", "; ", arguments_key="parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "", (NAME, "[ARGS]"), optional="[CALL_ID]", id_length=9)
DEEPSEEK = ToolFormat(
    "deepseek",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "",
    (NAME, "<｜tool▁sep｜>"),
    sections=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK,
    name="deepseek_v3",
    separator="\n",
    head=("function", "<｜tool▁sep｜>", NAME, "\n```json\n"),
    tail="\n```",
)
KIMI = ToolFormat(
    "kimi",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "",
    ("functions.", NAME, ":", _NUMBER, "<|tool_call_argument_begin|>"),
    sections=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)

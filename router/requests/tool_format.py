"""Forms of tool calls in the text of models, and grammars that enforce them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from protos.messages import Grammar, GrammarKind
from router.requests.structured_output import schema_source
from router.requests.tools import Function, ToolUse

_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls as JSON objects with `name` and `arguments_key`, between `begin` and `end`.

    An empty `begin` means that the whole answer is calls if its first character is a brace.
    """

    name: str
    arguments_key: str
    begin: str
    end: str
    separator: str

    def grammar(self, use: ToolUse, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the output: calls alone where one is required, or else a text, with or without calls.

        `answer` constrains that text; None leaves it free. None where nothing is constrained.
        """
        is_strict = any(function.strict for function in use.callable_) or len(use.callable_) < len(use.tools)
        if use.is_required:
            start = self._calls(use)
        elif answer is not None:
            start = f"{self._calls(use)} | answer"
        elif is_strict or not use.is_parallel:
            start = self._calls_in_text(use)
        else:
            return None
        rules = [f"start: {start}", *self._call_rules(use)]
        if answer is not None:
            rules.append(f"answer: %json {answer.source}")
        return Grammar(GrammarKind.GRAMMAR, "%llguidance {}\n" + "\n".join(rules) + "\n", "tools")

    def _calls(self, use: ToolUse) -> str:
        call = f"{_literal(self.begin + self._newline)} call {_literal(self._newline + self.end)}".strip()
        return f"{call} ({_literal(self.separator)} {call})*" if use.is_parallel else call

    def _calls_in_text(self, use: ToolUse) -> str:
        """Return the rule of a free text in which every beginning of a call is followed by a valid one."""
        if not self.begin:
            return f"{self._calls(use)} | /\\s*[^{{\\s](.|\\n)*/"
        call = f"begin {_literal(self._newline)} call {_literal(self._newline + self.end)}"
        return f"TEXT | ({call})+ TEXT" if use.is_parallel else f"TEXT | {call}"

    def _call_rules(self, use: ToolUse) -> list[str]:
        heads = [f"{_literal(self._head(function))} arguments_{rank}" for rank, function in enumerate(use.callable_)]
        arguments = [
            f"arguments_{rank}: %json {schema_source('tools', _schema(function, use))}"
            for rank, function in enumerate(use.callable_)
        ]
        text = ["TEXT: /(.|\\n)*/", f"begin[lazy]: TEXT {_literal(self.begin)}"] if self.begin else []
        return [f"call: ({' | '.join(heads)}) {_literal('}')}", *arguments, *text]

    def _head(self, function: Function) -> str:
        return f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '

    @property
    def _newline(self) -> str:
        return "\n" if self.begin else ""


def _schema(function: Function, use: ToolUse) -> object:
    """Return the schema of the arguments: their own if a call is required or the function is strict."""
    return function.schema_ if use.is_required or function.strict else _ANY_ARGUMENTS


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


HERMES = ToolFormat("hermes", "arguments", "<tool_call>", "</tool_call>", "\n")
LLAMA = ToolFormat("llama", "parameters", "", "", "; ")
# Marks of forms that are not read here: such calls would come back as text.
_UNREAD = ("<function=", "[TOOL_CALLS]", "<|channel|>", "<arg_key>", "tool_calls_begin", "tool_calls_section_begin")
FORMATS = {format_.name: format_ for format_ in (HERMES, LLAMA)}


def find_format(template: str, wanted: str = "auto") -> ToolFormat | None:
    """Return the format in a chat template, or the one that is `wanted`; None if the template has none read here."""
    if "tools" not in template:
        return None
    if wanted != "auto":
        return FORMATS[wanted]
    if any(mark in template for mark in _UNREAD):
        return None
    if HERMES.begin in template:
        return HERMES
    return LLAMA if '"parameters"' in template or "python_tag" in template else None

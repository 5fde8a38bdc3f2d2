"""Calls in OpenAI's harmony form: messages to functions, on the channel commentary."""

from __future__ import annotations

from dataclasses import dataclass

from router.generation.tool_formats.tool_format import NAME, ToolFormat, literal
from router.requests.tools import Function, ToolUse

START, CHANNEL, MESSAGE, END, CALL_END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
END_MARKS = (START, END, CALL_END, "<|return|>")
_CONSTRAIN = "<|constrain|>"
_COMMENTARY = "commentary to=functions."
CALL_BEGIN = CHANNEL + _COMMENTARY


@dataclass(frozen=True, slots=True)
class HarmonyFormat(ToolFormat):
    """A call is the last message of an answer, after its thoughts and its text.

    The grammars are of the whole answer, its thoughts included, and of marks that are tokens.
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

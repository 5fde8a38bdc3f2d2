"""Forms in which models think before they answer, and the thought that a prompt leaves open."""

from __future__ import annotations

from dataclasses import dataclass

from protos.messages import Thought
from router.tokenizer.tokenizer import Tokenizer

# Beginning and end of a thought, by the name of the form; each is one token where a model thinks in it.
MARKS = {
    "think": ("<think>", "</think>"),  # Qwen3, DeepSeek, GLM, Kimi, MiniMax, Nemotron, SmolLM3, Hunyuan
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "thinking": ("<thinking>", "</thinking>"),
    "thought": ("<|begin_of_thought|>", "<|end_of_thought|>"),
    "gemma": ("<|channel>", "<channel|>"),
}
_LABELS = {"gemma": "thought\n"}  # which stands first in a thought and is none of it


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tokens that begin and end a thought."""

    name: str
    begin_id: int
    end_id: int
    label: str = ""


def find_reasoning(tokenizer: Tokenizer, template: str, wanted: str = "auto") -> ReasoningFormat | None:
    """Return the form in which a model thinks: the one whose marks are tokens and stand in its chat template.

    `wanted` is the form's name, none, or auto; a form that is named need not stand in the template.
    """
    for name, marks in MARKS.items():
        begin_id, end_id = map(tokenizer.token_id, marks)
        is_meant = wanted == name or (wanted == "auto" and any(mark in template for mark in marks))
        if is_meant and begin_id is not None and end_id is not None:
            return ReasoningFormat(name, begin_id, end_id, _LABELS.get(name, ""))
    return None


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thought at the beginning of an answer: open already, since the prompt began it, or perhaps to come."""

    format: ReasoningFormat
    is_open: bool
    is_shown: bool = True

    @property
    def mark(self) -> Thought:
        """The thought as grammars know it, which begin behind it."""
        return Thought(self.format.end_id, None if self.is_open else self.format.begin_id)


def thinking_after(
    prompt_token_ids: list[int], format_: ReasoningFormat | None, tokenizer: Tokenizer, *, is_shown: bool
) -> Thinking | None:
    """Return the thought that may come after a prompt; None where none can, or the prompt has ended it."""
    if format_ is None:
        return None
    last = next((each for each in reversed(prompt_token_ids) if tokenizer.token_text(each).strip()), None)
    return None if last == format_.end_id else Thinking(format_, last == format_.begin_id, is_shown)

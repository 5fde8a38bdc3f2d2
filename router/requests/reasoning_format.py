"""The forms of models' thoughts, and the thought that a prompt leaves open."""

from __future__ import annotations

from dataclasses import dataclass

from protos.messages import Thought
from router.tokenizer import Tokenizer

HARMONY = "harmony"
# Beginning and end of a thought, by the name of the form; each is one token where a model thinks in it. In harmony a
# thought is a message on a channel of its own: these marks enclose the heads of messages, and the messages.
MARKS: dict[str, tuple[str, ...]] = {
    "think": ("<think>", "</think>"),  # Qwen3, DeepSeek, GLM, Kimi, MiniMax, Nemotron, SmolLM3, Hunyuan
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "thinking": ("<thinking>", "</thinking>"),
    "thought": ("<|begin_of_thought|>", "<|end_of_thought|>"),
    "gemma": ("<|channel>", "<channel|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    HARMONY: ("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
}
_LABELS = {"gemma": "thought\n"}  # a thought's first token, not part of its text
_ANSWER = "final"  # the channel of harmony's answers


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tokens that begin and end a thought: it ends with all `end_ids` in sequence."""

    name: str
    begin_id: int
    end_ids: tuple[int, ...]
    label: str = ""

    @property
    def end_id(self) -> int:
        """The last token of the end."""
        return self.end_ids[-1]


def find_reasoning(tokenizer: Tokenizer, template: str, wanted: str = "auto") -> ReasoningFormat | None:
    """Return the form of a model's thoughts: its marks are tokens and appear in its chat template.

    `wanted` is the form's name, none, or auto; a named form need not appear in the template.
    """
    for name, marks in MARKS.items():
        ids = [id_ for id_ in map(tokenizer.token_id, marks) if id_ is not None]
        is_meant = wanted == name or (wanted == "auto" and any(mark in template for mark in marks))
        if is_meant and len(ids) == len(marks):
            begin_id, end_id, *_ = ids
            is_head = name == HARMONY  # the answer's head ends all thoughts
            head_ids = (begin_id, *tokenizer.encode(_ANSWER, add_special_tokens=False)) if is_head else ()
            return ReasoningFormat(name, begin_id, (*head_ids, end_id), _LABELS.get(name, ""))
    return None


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thought at the beginning of an answer: open already, since the prompt began it, or perhaps to come.

    `head_ids` are the prompt's part of the answer's first message, if the form has messages; `has_tools` is true if a
    message may be a call. `is_continued`: the prompt ends inside a thought or an answer, whose white space counts.
    """

    format: ReasoningFormat
    is_open: bool
    is_shown: bool = True
    head_ids: tuple[int, ...] = ()
    has_tools: bool = False
    is_continued: bool = False

    @property
    def mark(self) -> Thought | None:
        """The end mark of the thought, for grammars that begin after it; None if the prompt has ended the thought."""
        if self.format.name == HARMONY:
            return Thought(self.format.end_ids) if self.is_open else None
        return Thought(self.format.end_ids, None if self.is_open else self.format.begin_id)


def thinking_after(
    prompt_token_ids: list[int],
    format_: ReasoningFormat | None,
    tokenizer: Tokenizer,
    *,
    is_shown: bool,
    has_tools: bool = False,
    continued: str | None = None,
) -> Thinking | None:
    """Return the thought that may come after a prompt; None where none can, or the prompt has ended it.

    `continued` is the answer so far if the prompt ends with it.
    """
    if format_ is None:
        return None
    if format_.name == HARMONY:
        head_ids = _last_message(prompt_token_ids, tokenizer.token_id("<|start|>"))
        is_open = format_.end_id not in head_ids
        return Thinking(format_, is_open, is_shown, head_ids, has_tools, is_continued=continued is not None)
    if continued is not None:
        begin, end = MARKS[format_.name][:2]
        is_open = begin in continued and end not in continued.rpartition(begin)[2]
        return Thinking(format_, is_open, is_shown, is_continued=True) if is_open else None
    last = next((each for each in reversed(prompt_token_ids) if tokenizer.token_text(each).strip()), None)
    return None if last == format_.end_id else Thinking(format_, last == format_.begin_id, is_shown)


def _last_message(prompt_token_ids: list[int], start_id: int | None) -> tuple[int, ...]:
    """Return the message that the prompt leaves open, from its mark on."""
    places = (place for place in range(len(prompt_token_ids) - 1, -1, -1) if prompt_token_ids[place] == start_id)
    return tuple(prompt_token_ids[next(places, len(prompt_token_ids)) :])

"""Separates a model's thoughts from its answer, token by token."""

from __future__ import annotations

import re
from enum import Enum, auto

from router.generation.tool_formats.whole_format import CALL_BEGIN, CALL_END, CHANNEL, END_MARKS, MESSAGE
from router.requests.reasoning_format import Thinking
from router.tokenizer import Tokenizer

_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_PAUSE = "\n\n"  # between two messages of a kind


class _MessagePart(Enum):
    """A part of a message."""

    HEAD = auto()
    THOUGHT = auto()
    ANSWER = auto()
    CALL = auto()


class HarmonyReader:
    """Sorts the tokens of an answer into thoughts, answer and calls.

    A message is a head, up to `<|message|>`, that names a channel and perhaps a recipient, and a text up to the next
    mark. Messages on the channel analysis are thoughts, messages to a function are calls. Any other recipient is a tool
    that is not run here, and its message is a thought. The head may name channel and recipient in either order:
    `replacement` has the head of a call in the order that its tool format parses.
    """

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer) -> None:
        """Begin inside the message that the prompt left open."""
        self._tokenizer = tokenizer
        self._has_tools = thinking.has_tools
        self._channel_id = tokenizer.token_id(CHANNEL)
        self._message_id = tokenizer.token_id(MESSAGE)
        self._end_ids = {tokenizer.token_id(mark) for mark in END_MARKS} - {None}
        self._part = _MessagePart.HEAD
        self._head = ""
        self._num_head = 0
        self._seen_parts: set[_MessagePart] = set()
        self.replacement = ""  # text that replaces the mark
        self.num_tokens = 0  # of thoughts, their heads and marks included
        for token_id in thinking.head_ids:
            self.take(token_id)
        self.replacement, self.num_tokens, self._num_head = "", 0, 0
        self._seen_parts.clear()

    @property
    def is_thinking(self) -> bool:
        """True in a thought."""
        return self._part is _MessagePart.THOUGHT

    def take(self, token_id: int) -> bool:
        """Take the next token; return True if it is a mark: part of a head, or the end of a message."""
        self.replacement = ""
        self.num_tokens += self.is_thinking
        is_end = token_id in self._end_ids
        if is_end or (token_id == self._channel_id and self._part is not _MessagePart.HEAD):
            self._end_message()
        if self._part is not _MessagePart.HEAD:
            return False
        self._num_head += 1
        if token_id == self._message_id:
            self._begin_text()
        elif not is_end:
            self._head += self._tokenizer.token_text(token_id)
        return True

    def _end_message(self) -> None:
        self.replacement = CALL_END if self._part is _MessagePart.CALL else ""
        self._part, self._head, self._num_head = _MessagePart.HEAD, "", 0

    def _begin_text(self) -> None:
        recipient = match[1] if (match := _RECIPIENT.search(self._head)) else ""
        channel = match[1] if (match := _CHANNEL.search(self._head)) else ""
        if recipient.startswith(_FUNCTIONS) and self._has_tools:
            self._part = _MessagePart.CALL
            self.replacement = f"{CALL_BEGIN}{recipient.removeprefix(_FUNCTIONS)}{MESSAGE}"
            return
        self._part = _MessagePart.THOUGHT if recipient or channel == "analysis" else _MessagePart.ANSWER
        self.replacement = _PAUSE if self._part in self._seen_parts else ""
        self._seen_parts.add(self._part)
        if self.is_thinking:
            self.num_tokens += self._num_head


class ThoughtReader:
    """Sorts the tokens of an answer into thought and answer; marks are neither."""

    replacement = ""  # no text replaces a mark

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer) -> None:
        self._format = thinking.format
        self._tokenizer = tokenizer
        self._may_begin = not thinking.is_open
        self.is_thinking = thinking.is_open
        self.num_tokens = 0  # of the thought, its marks included

    def take(self, token_id: int) -> bool:
        """Take the next token; return True if it is a mark: the beginning or the end of the thought."""
        if self.is_thinking:
            self.num_tokens += 1
            self.is_thinking = token_id != self._format.end_id
            return not self.is_thinking
        if self._may_begin:
            if token_id == self._format.begin_id:
                self.num_tokens += 1
                self._may_begin, self.is_thinking = False, True
                return True
            self._may_begin = not self._tokenizer.token_text(token_id).strip()
        return False


class Trimmed:
    """A text that grows, without the white space around it: what may turn out to be its end is held back."""

    def __init__(self, label: str = "") -> None:
        """`label` is left out where the text begins with it."""
        self._label = label
        self._has_begun = False
        self._held = ""

    def push(self, piece: str) -> str:
        """Return the text known for certain to be inside."""
        text = self._held + piece
        if self._label.startswith(text):
            self._held = text
            return ""
        text = text.removeprefix(self._label)
        self._label = ""
        text = text if self._has_begun else text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        self._has_begun |= bool(shown)
        return shown

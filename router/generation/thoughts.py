"""Separates a model's thoughts from its answer, token by token."""

from __future__ import annotations

from router.requests.reasoning_format import Thinking
from router.tokenizer.tokenizer import Tokenizer


class ThoughtReader:
    """Says of each token of an answer whether it is thought or answer; its marks are neither."""

    spelled = ""  # no text replaces a mark

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer) -> None:
        self._format = thinking.format
        self._tokenizer = tokenizer
        self._may_begin = not thinking.is_open
        self.is_thinking = thinking.is_open
        self.num_tokens = 0  # of the thought, its marks included

    def is_mark(self, token_id: int) -> bool:
        """Read a token; True if it begins or ends the thought."""
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

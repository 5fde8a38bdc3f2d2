"""Text that grows with its tokens, in whole characters.

Where tokens are bytes (`protos.token_bytes`), an incremental UTF-8 decoder is exact and looks at each token
once. For the rest, the decode-window method of Text Generation Inference and vLLM: decode a few tokens of context
with and without the new one.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from router.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one sequence, token by token. The pieces joined are the text of all tokens."""

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Return the rest at the end; bytes that never became a character read U+FFFD."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    kept_ids: Collection[int] = (),
) -> Detokenizer:
    """Return a detokenizer for the text that follows the prompt; `kept_ids` are special tokens that are not skipped."""
    if tokenizer.has_token_bytes:
        return ByteDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, kept_ids=kept_ids)
    is_skipping = skip_special_tokens and not kept_ids  # here all are kept or none
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=is_skipping)


class ByteDetokenizer:
    """Exact and constant time per token, for tokenizers whose tokens are bytes."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, kept_ids: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept_ids = frozenset(kept_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        is_kept = not self._skip_special_tokens or token_id in self._kept_ids
        if not is_kept and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any decoder: the new text is the growth of the decoded window.

    `_window[:_num_read]` has been shown; the rest is held back until its text no longer ends in a replacement
    character.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-5:])  # they decide whether the first new token begins with a space
        self._num_read = len(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        del self._window[: self._num_read]  # what has been read becomes the context of the next
        self._num_read = len(self._window)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._num_read = len(self._window)
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._window[: self._num_read])
        return self._decode(self._window)[len(shown) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

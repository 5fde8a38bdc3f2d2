"""Text to token ids and back, all at once or token by token, and chats to prompts; no torch, no transformers."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer as TokenizerCore

from protos.errors import RequestError
from protos.token_bytes import find_token_bytes

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """One model's tokenizer.

    Safe to share between coroutines. `core` must not truncate or pad, as `load_tokenizer` ensures.
    """

    def __init__(self, core: TokenizerCore) -> None:
        self._core = core
        self._bytes_of_name = find_token_bytes(core)
        added = core.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._longest_token = max(map(len, core.get_vocab()), default=1)

    def max_text_len(self, num_tokens: int) -> int:
        """Return the most characters that a text of `num_tokens` tokens can have."""
        return num_tokens * self._longest_token

    @property
    def has_token_bytes(self) -> bool:
        """True if a sequence's text is the concatenation of its tokens' bytes, independent of their context."""
        return self._bytes_of_name is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Raises:
            RequestError: the text cannot be written in UTF-8 (it holds a lone surrogate).
        """
        try:
            [encoding] = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            raise RequestError("The text is not valid Unicode: it holds a lone surrogate.") from None
        return encoding.ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode as `encode` does; a long text is encoded in a thread, outside the interpreter lock."""
        if len(text) <= 8_192:  # some milliseconds; a longer text leaves the event loop free
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return self._core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    async def decode_async(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode as `decode` does; many tokens are decoded in a thread, outside the interpreter lock."""
        if len(token_ids) <= 2_048:  # some milliseconds
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        texts = await asyncio.to_thread(self._core.decode_batch, [list(token_ids)], skip_special_tokens)
        return str(texts[0])

    def is_special(self, token_id: int) -> bool:
        """True if the token is a control token, which is not shown to readers."""
        return token_id in self._special_ids

    def is_added(self, token_id: int) -> bool:
        """True if the token was added to the tokenizer's own vocabulary, as marks of chats are."""
        return token_id in self._added_ids

    def token_id(self, name: str) -> int | None:
        """Return the id of the token of that name; None where the vocabulary has none."""
        return self._core.token_to_id(name)

    def token_name(self, token_id: int) -> str | None:
        """Return the vocabulary's name of the token; None for an id without one."""
        return self._core.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes; a character may be spread over several tokens."""
        name = self.token_name(token_id)
        if name is None:
            return b""
        if self._bytes_of_name is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        return self._bytes_of_name(name)

    def token_text(self, token_id: int) -> str:
        r"""Return the token's bytes as text, as in OpenAI's API: a part of a character reads `bytes:\xe2\x80`."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TokenIdsOnly(Tokenizer):
    """Stands in for a model without tokenizer files: token ids pass through, there is no text."""

    def __init__(self) -> None:
        self._special_ids = frozenset()
        self._added_ids = frozenset()
        self._longest_token = 1 << 32  # so that `encode` refuses texts, whatever their length

    @property
    def has_token_bytes(self) -> bool:
        return True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise RequestError("This model has no tokenizer.json, so it takes no text; send the prompt as token ids.")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    async def decode_async(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def token_id(self, name: str) -> int | None:
        return None

    def token_name(self, token_id: int) -> str | None:
        return None


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    kept_ids: Collection[int] = (),
) -> ByteDetokenizer | WindowDetokenizer:
    """Return a detokenizer for the text that follows the prompt; `kept_ids` are special tokens that are not skipped."""
    if tokenizer.has_token_bytes:
        return ByteDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, kept_ids=kept_ids)
    is_skipping = skip_special_tokens and not kept_ids  # here all are kept or none
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=is_skipping)


class ByteDetokenizer:
    """The text of one sequence, token by token: exact and in constant time, for tokenizers whose tokens are bytes.

    The pieces joined are the text of all tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, kept_ids: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept_ids = frozenset(kept_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; empty while a character is incomplete."""
        is_kept = not self._skip_special_tokens or token_id in self._kept_ids
        if not is_kept and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return the rest at the end; bytes that never became a character read U+FFFD."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """The same for any decoder: the new text is the growth of the decoded window (Text Generation Inference and vLLM).

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


Detokenizer = ByteDetokenizer | WindowDetokenizer

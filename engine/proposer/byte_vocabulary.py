"""A tokenizer as a mapping between tokens and bytes, and a text of one vocabulary encoded again in another."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from pathlib import Path

from tokenizers import Tokenizer as TokenizerCore

from engine.sequence.sequence import num_equal
from protos.errors import ConfigError
from protos.token_bytes import find_token_bytes

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Possible prefixes of a text while it is encoded: some tokenizers add a space before the first word of any text.
_LEADS = ("", "\n", ".")


class ByteVocabulary:
    """One tokenizer's tokens.

    Attributes:
        names: The name of each id, control tokens included.
        special_ids: Control tokens, which have no text.
        id_of: Bytes -> id of the token that spells them; an ordinary token is preferred to a byte token.
    """

    def __init__(self, core: TokenizerCore, vocab_size: int) -> None:
        """Use the ids below `vocab_size`. Raises ConfigError if tokens do not spell fixed bytes."""
        spelling = find_token_bytes(core)
        if spelling is None:
            raise ConfigError(
                "its tokens have no fixed bytes (it is not byte-level and not SentencePiece), so they cannot be "
                "compared with another tokenizer's; use a draft with the target's tokenizer"
            )
        core.no_truncation()
        core.no_padding()
        self._core = core
        self.names = names_of(core, vocab_size)
        added = core.get_added_tokens_decoder()
        self.special_ids = frozenset(each for each, token in added.items() if token.special and each in self.names)
        self._bytes = {
            token_id: spelling(name) for token_id, name in self.names.items() if token_id not in self.special_ids
        }
        self.id_of: dict[bytes, int] = {}
        for token_id in sorted(
            self._bytes, key=lambda each: (_BYTE_TOKEN.fullmatch(self.names[each]) is not None, each)
        ):
            self.id_of.setdefault(self._bytes[token_id], token_id)
        self.id_of.pop(b"", None)

    @classmethod
    def from_file(cls, file: Path, vocab_size: int) -> ByteVocabulary:
        """Load a tokenizer.json. Raises ConfigError if that fails, or if tokens do not spell fixed bytes."""
        core = read_tokenizer(file)
        try:
            return cls(core, vocab_size)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes; empty for control tokens and unknown ids."""
        return self._bytes.get(token_id, b"")

    def spell(self, token_ids: Seq[int]) -> bytes:
        """Return the bytes of all tokens."""
        return b"".join(map(self.bytes_of, token_ids))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text` within a longer text.

        They spell exactly `text`, except if a normalizer changes it.
        """
        data = text.encode()
        for lead in _LEADS:
            if (after := self.encode_after(lead.encode(), lead.encode() + data)) is not None:
                return after
        return self._encode(text)

    def encode_after(self, before: bytes, data: bytes) -> list[int] | None:
        """Encode `data`, which begins with `before`, and return the tokens after `before`.

        None if a token crosses the end of `before`, or if `data` is not UTF-8.
        """
        try:
            token_ids = self._encode(data.decode())
        except UnicodeDecodeError:
            return None
        rest = data[len(before) :]
        num_missing = len(rest)
        start = len(token_ids)
        while num_missing > 0 and start > 0:
            start -= 1
            num_missing -= len(self.bytes_of(token_ids[start]))
        is_spelled = num_missing == 0 and self.spell(token_ids[start:]) == rest
        return token_ids[start:] if is_spelled else None

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return the tokens of `data`; if it is not UTF-8, one token per byte, without bytes that have no token."""
        try:
            return self.encode(data.decode())
        except UnicodeDecodeError:
            return [self.id_of[each] for value in data if (each := bytes((value,))) in self.id_of]

    def ends(self, token_ids: Seq[int]) -> list[int]:
        """Return the end of each token in the bytes of all tokens."""
        return list(accumulate(len(self.bytes_of(token_id)) for token_id in token_ids))

    def _encode(self, text: str) -> list[int]:
        return [each for each in self._core.encode(text, add_special_tokens=False).ids if each in self.names]


def read_tokenizer(file: Path) -> TokenizerCore:
    """Load a tokenizer.json. Raises ConfigError if the file is not a tokenizer."""
    try:
        return TokenizerCore.from_file(str(file))
    except Exception as error:  # the Rust library raises bare Exception
        raise ConfigError(f"{file} cannot be read as a tokenizer: {error}") from error


def names_of(core: TokenizerCore, vocab_size: int) -> dict[int, str]:
    """Return the name of each id below `vocab_size`, control tokens included."""
    names = core.get_vocab(with_added_tokens=True)
    return {token_id: name for name, token_id in names.items() if token_id < vocab_size}


_SPACES = b" \n\t\r"


class TextReader:
    """Translates one growing sequence of the target's tokens; `token_ids` has the draft's tokens.

        target    | the | tok | eni |            the | tok | eni | zer |
        draft     | the | token | i |            the | tokenizer |          the last tokens change with what follows
                  '- settled -''-- tail --'

    The last tokens of a text are provisional, since later tokens may belong to the same word. So the end of the text,
    the tail, is encoded again at every commit. Tokens before it are settled and never change, even if the whole text
    would be encoded differently: any spelling is a valid context for a draft. The bytes of an incomplete character are
    held back.
    """

    def __init__(
        self, target: ByteVocabulary, draft: ByteVocabulary, special_ids: Mapping[int, tuple[int, ...]]
    ) -> None:
        self.token_ids: list[int] = []
        self._target = target
        self._draft = draft
        self._special_ids = special_ids
        self._num_translated = 0
        self._num_settled = 0
        self._tail = ""
        self._decoder = _new_decoder()

    @property
    def held(self) -> bytes:
        """The first bytes of an incomplete character."""
        return self._decoder.getstate()[0]

    def extend(self, target_ids: Seq[int]) -> int:
        """Translate the tokens of `target_ids` that were added since the last call.

        Returns how many of the first `token_ids` have not changed.
        """
        num_settled = self._num_settled
        known = self.token_ids[num_settled:]
        for token_id in target_ids[self._num_translated :]:
            if token_id in self._special_ids:
                self._end_text(self._special_ids[token_id])
            else:
                self._tail += self._decoder.decode(self._target.bytes_of(token_id))
        self._num_translated = len(target_ids)
        self._encode_tail()
        self._settle()
        return num_settled + num_equal(known, self.token_ids[num_settled:])

    def _end_text(self, special_ids: Seq[int]) -> None:
        """End the text before a control token, even within a character, and append the control token."""
        self._tail += self._decoder.decode(b"", final=True)
        self._decoder = _new_decoder()
        self._encode_tail()
        self.token_ids += special_ids
        self._num_settled = len(self.token_ids)
        self._tail = ""

    def _encode_tail(self) -> None:
        self.token_ids[self._num_settled :] = self._draft.encode(self._tail) if self._tail else []

    def _settle(self) -> None:
        """Settle all but the last words of a tail that has grown long."""
        data = self._tail.encode()
        if len(data) <= 256:  # so much text is encoded again every time
            return
        tail_ids = self.token_ids[self._num_settled :]
        if self._draft.spell(tail_ids) != data:  # the tokenizer changes texts, so the end of a token is unknown
            self._num_settled, self._tail = len(self.token_ids), ""
            return
        # Settle up to the last border between words, or between tokens, that leaves a tail of 64 bytes.
        borders = [
            (num_tokens, end)
            for num_tokens, end in enumerate(self._draft.ends(tail_ids), start=1)
            if end <= len(data) - 64 and data[end] & 0xC0 != 0x80
        ]
        between_words = [border for border in borders if data[border[1]] in _SPACES]
        if borders:
            num_tokens, end = (between_words or borders)[-1]
            self._num_settled += num_tokens
            self._tail = data[end:].decode()


def _new_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")

"""A tokenizer as a mapping between tokens and bytes, which makes two vocabularies comparable."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from itertools import accumulate
from pathlib import Path

from tokenizers import Tokenizer as TokenizerCore

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
        for token_id in sorted(self._bytes, key=lambda each: (_is_byte_token(self.names[each]), each)):
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
            return [self.id_of[each] for each in map(_byte, data) if each in self.id_of]

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


def _is_byte_token(name: str) -> bool:
    return _BYTE_TOKEN.fullmatch(name) is not None


def _byte(value: int) -> bytes:
    return bytes((value,))

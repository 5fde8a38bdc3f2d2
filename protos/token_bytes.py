"""The bytes that one token adds to the text, for the two encodings of almost every causal language model.

Byte-level BPE (GPT-2, Llama 3, Qwen, ...) writes each byte as one printable character. SentencePiece (Llama 2,
Mistral, Gemma, ...) writes a space as U+2581 and a byte that has no token of its own as `<0xXX>`. In both, the text
of a sequence is the concatenation of its tokens' bytes, so it can be decoded as it grows without looking back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as TokenizerCore

TokenBytes = Callable[[str], bytes]

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def shared_tokenizer(file: Path) -> TokenizerCore:
    """Return the tokenizer in a file, the same for all of a process until the file changes or `forget_tokenizer`.

    Reading takes 0.2 s and 30 MB for 49,000 tokens, and a start needs the tokenizer in nine places.

    Raises:
        Exception: the file is no tokenizer; the Rust library has no other type.
    """
    status = file.stat()
    return _read_tokenizer(str(file), status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _read_tokenizer(file: str, *version: int) -> TokenizerCore:
    return TokenizerCore.from_file(file)


def forget_tokenizer() -> None:
    """Free the tokenizer, unless something else holds it."""
    _read_tokenizer.cache_clear()


def find_token_bytes(core: TokenizerCore) -> TokenBytes | None:
    """Return the function from a token's string to its bytes, by the tokenizer's decoder; None for an unusual one."""
    kinds = {}
    for decoder in _decoders(core):
        kinds[decoder["type"]] = decoder
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if "Metaspace" in kinds or _SPACE_MARK in json.dumps(kinds.get("Replace"), ensure_ascii=False):
        return sentencepiece_bytes
    return None


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with any other character (an added token) is plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: a byte token's byte, or the text with spaces for its space marks."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _decoders(core: TokenizerCore) -> Iterator[dict[str, object]]:
    if core.decoder is None:
        return
    pending = [json.loads(core.decoder.__getstate__())]
    while pending:
        decoder = pending.pop()
        yield decoder
        pending.extend(decoder.get("decoders", ()))


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map: a printable Latin-1 byte is its own character, the others follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if chr(byte) not in alphabet]
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()

"""Header of a GGUF file. Unservable files are refused by it before any weight is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO

from engine.model.checkpoint.gguf_metadata import (
    BLOCKS,
    GgufArray,
    GgufHeader,
    GgufTensor,
    Value,
    check_sizes,
    check_tokenizer,
    positive_integer,
)
from protos.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # a string's length
_BLOCK_NUMBERS = (2, 3, 6, 7, 8, 10, 11, 12, 13, 14)
# Supported types: name, numbers per block, bytes per block.
_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2)} | {
    number: (name, *sizes) for number, (name, sizes) in zip(_BLOCK_NUMBERS, BLOCKS.items(), strict=True)
}


def read_gguf_header(file: Path) -> GgufHeader:
    """Read and check the header of `file`.

    Raises:
        ConfigError: the file is not GGUF, cut short, one part of several, has a tensor of an unsupported type, or has
            metadata that is missing or contradictory.
    """
    try:
        with file.open("rb") as stream, _mapped(stream) as content:
            header = _HeaderParser(content, file).header()
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}; check its path and permissions") from None
    except (struct.error, UnicodeDecodeError, MemoryError):
        raise ConfigError(f"{str(file)!r} has a damaged or truncated GGUF header; fetch the file again") from None
    check_sizes(header)
    check_tokenizer(header)
    return header


@contextmanager
def _mapped(stream: BinaryIO) -> Iterator[mmap | bytes]:
    """Map the file, so that a header that claims too much reads nothing beyond the file's end."""
    try:
        content = mmap(stream.fileno(), 0, access=ACCESS_READ)
    except ValueError:  # an empty file
        yield b""
        return
    with content:
        yield content


class _HeaderParser:
    """Parses a header from its start, within the sizes of the file and of `_MAX_*`."""

    def __init__(self, content: mmap | bytes, file: Path) -> None:
        self._content, self._file = content, file
        self._place = 0
        self._end = min(len(content), 1 << 28)
        self._num_strings_left = 1 << 21

    def header(self) -> GgufHeader:
        if (magic := self._content[: len(_MAGIC)]) != _MAGIC:
            raise ConfigError(f"{str(self._file)!r} is not a GGUF file: it begins with {magic!r}; give a .gguf file")
        self._place = len(_MAGIC)
        if (version := self._number("I")) not in _VERSIONS:
            raise ConfigError(f"{str(self._file)!r} is GGUF version {version}; supported versions are 2 and 3")
        # Bound the counts by the file's size before reading any entry.
        num_tensors, num_values = int(self._number("Q")), int(self._number("Q"))
        most = 1 << 16  # the largest models have a few thousand tensors
        if max(num_tensors, num_values) > most:
            raise ConfigError(
                f"{str(self._file)!r} claims {num_tensors:,} tensors and {num_values:,} values of metadata; the limit "
                f"is {most:,} each; fetch the file again"
            )
        # A value has a key, its type and a byte; a tensor has a name, its number of dimensions, its type and an offset.
        self._expect(num_values * 13 + num_tensors * 24)
        # Metadata.
        values: dict[str, Value] = {}
        for _ in range(num_values):
            key, value = self._entry()
            if key in values:
                raise ConfigError(f"{str(self._file)!r} has {key!r} twice in its metadata; fetch the file again")
            values[key] = value
        if (num_parts := positive_integer(self._file, "split.count", values.get("split.count") or 1)) > 1:
            raise ConfigError(
                f"{str(self._file)!r} is one of {num_parts} parts; join them with llama-gguf-split --merge"
            )
        alignment = positive_integer(self._file, "general.alignment", values.get("general.alignment", 32))
        # Tensors; the end of the last one must lie within the file.
        tensors: dict[str, GgufTensor] = {}
        num_bytes = 0
        for _ in range(num_tensors):
            tensor, end = self._tensor()
            if tensor.name in tensors:
                raise ConfigError(f"{str(self._file)!r} has tensor {tensor.name!r} twice; fetch the file again")
            tensors[tensor.name] = tensor
            num_bytes = max(num_bytes, end)
        self._check_size(num_bytes, alignment)
        return GgufHeader(self._file, values, tuple(tensors.values()))

    def _tensor(self) -> tuple[GgufTensor, int]:
        """Return a tensor and the byte offset of its end in the data."""
        name = self._string()
        if (num_dims := int(self._number("I"))) > 4:
            raise ConfigError(
                f"tensor {name!r} of {str(self._file)!r} has {num_dims:,} dimensions; the limit is "
                "4; fetch the file again"
            )
        dims = [int(self._number("Q")) for _ in range(num_dims)]
        number, offset = int(self._number("I")), int(self._number("Q"))
        if number not in _TYPES:
            read = ", ".join(each for each, *_ in _TYPES.values())
            raise ConfigError(
                f"tensor {name!r} of {str(self._file)!r} has GGUF type {number}, which is not supported; use {read}"
            )
        kind, block, block_bytes = _TYPES[number]
        return GgufTensor(name, kind, tuple(reversed(dims))), offset + math.prod(dims) // block * block_bytes

    def _check_size(self, num_bytes: int, alignment: int) -> None:
        begin = -(-self._place // alignment) * alignment
        size = len(self._content)
        if begin + num_bytes > size:
            raise ConfigError(
                f"{str(self._file)!r} is cut short: its tensors end at byte {begin + num_bytes:,}, but it has "
                f"{size:,} bytes; fetch it again"
            )

    def _entry(self) -> tuple[str, Value]:
        """Return the next metadata key and its value."""
        key, kind, length = self._string(), int(self._number("I")), None
        if kind == _ARRAY:
            kind, length = int(self._number("I")), int(self._number("Q"))
        if kind not in _SCALARS and kind != _STRING:
            what = f"GGUF type {kind}" if length is None else f"an array of {length:,} of GGUF type {kind}"
            raise ConfigError(
                f"{str(self._file)!r} has {key!r} as {what}; supported are numbers, strings and arrays of these; fetch "
                "the file again"
            )
        if length is None:
            return key, self._value(kind)
        self._skip(kind, length)
        return key, GgufArray(length)

    def _value(self, kind: int) -> int | float | bool | str:
        return self._string() if kind == _STRING else self._number(_SCALARS[kind])

    def _skip(self, kind: int, length: int) -> None:
        if kind in _SCALARS:
            self._bytes_of(length * struct.calcsize(_SCALARS[kind]))
            return
        if length > self._num_strings_left:
            raise struct.error
        self._num_strings_left -= length
        content, place, end, num_bytes = self._content, self._place, self._end, _LENGTH.size
        for _ in range(length):  # half a million times for large vocabularies
            if place > end:
                raise struct.error
            place += num_bytes + _LENGTH.unpack_from(content, place)[0]
        self._place = place
        self._expect(0)

    def _string(self) -> str:
        count = int(self._number("Q"))
        place = self._bytes_of(count)
        return self._content[place : place + count].decode("utf-8")

    def _number(self, kind: str) -> int | float | bool:
        place = self._bytes_of(struct.calcsize(kind))
        number: int | float | bool = struct.unpack_from(f"<{kind}", self._content, place)[0]
        return number

    def _bytes_of(self, num_bytes: int) -> int:
        """Advance by `num_bytes`; return the offset before."""
        self._expect(num_bytes)
        place = self._place
        self._place += num_bytes
        return place

    def _expect(self, num_bytes: int) -> None:
        """Raise if the header cannot have `num_bytes` more."""
        if self._place + num_bytes > self._end:
            raise struct.error

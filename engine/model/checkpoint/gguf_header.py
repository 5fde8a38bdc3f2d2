"""The header of a GGUF file: enough to refuse one that cannot be served, without reading a weight.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

from engine.model.checkpoint.gguf_metadata import (
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
_MAX_COUNT = 1 << 24  # more entries or longer names are no header but noise
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_ALIGNMENT = 32
# Types that are read: name, numbers in a block, bytes of a block.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


def read_gguf_header(file: Path) -> GgufHeader:
    """Read and check the header of `file`.

    Raises:
        ConfigError: it is no GGUF file, cut short, one part of several, or has a tensor of a type that is not read; or
            its metadata lacks what a model cannot be built without, or makes no sense.
    """
    try:
        with file.open("rb") as stream:
            header = _Reader(stream, file).header()
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}") from None
    except (struct.error, UnicodeDecodeError, MemoryError):
        raise ConfigError(f"{str(file)!r} is no whole GGUF file: its header is cut short or damaged") from None
    check_sizes(header)
    check_tokenizer(header)
    return header


class _Reader:
    """A header, read from its beginning."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self._stream, self._file = stream, file

    def header(self) -> GgufHeader:
        if (magic := self._stream.read(4)) != _MAGIC:
            raise ConfigError(f"{str(self._file)!r} is no GGUF file: it begins with {magic!r}")
        if (version := self._number("I")) not in _VERSIONS:
            raise ConfigError(f"{str(self._file)!r} is GGUF of version {version}; versions 2 and 3 are read")
        num_tensors, num_values = self._count(), self._count()
        values = dict(self._entry() for _ in range(num_values))
        if (num_parts := positive_integer(self._file, "split.count", values.get("split.count") or 1)) > 1:
            raise ConfigError(
                f"{str(self._file)!r} is one of {num_parts} parts; join them with llama-gguf-split --merge"
            )
        alignment = positive_integer(self._file, "general.alignment", values.get("general.alignment", _ALIGNMENT))
        tensors, num_bytes = [], 0
        for _ in range(num_tensors):
            tensor, end = self._tensor()
            tensors.append(tensor)
            num_bytes = max(num_bytes, end)
        self._check_size(num_bytes, alignment)
        return GgufHeader(self._file, values, tuple(tensors))

    def _tensor(self) -> tuple[GgufTensor, int]:
        """Return a tensor and the end of its data behind the header, in bytes."""
        name = self._string()
        if (num_dims := int(self._number("I"))) > _MAX_DIMS:
            raise ConfigError(
                f"tensor {name!r} of {str(self._file)!r} has {num_dims:,} dimensions, and GGUF's have at most "
                f"{_MAX_DIMS}; fetch the file again"
            )
        dims = [int(self._number("Q")) for _ in range(num_dims)]
        number, offset = int(self._number("I")), int(self._number("Q"))
        if number not in _TYPES:
            read = ", ".join(each for each, *_ in _TYPES.values())
            raise ConfigError(
                f"tensor {name!r} of {str(self._file)!r} is of GGUF type {number}, which is not read; read are {read}"
            )
        kind, block, block_bytes = _TYPES[number]
        return GgufTensor(name, kind, tuple(reversed(dims))), offset + math.prod(dims) // block * block_bytes

    def _check_size(self, num_bytes: int, alignment: int) -> None:
        begin = -(-self._stream.tell() // alignment) * alignment
        size = self._file.stat().st_size
        if begin + num_bytes > size:
            raise ConfigError(
                f"{str(self._file)!r} is cut short: its tensors end at byte {begin + num_bytes:,}, and it has "
                f"{size:,}; fetch it again"
            )

    def _entry(self) -> tuple[str, Value]:
        """Return a key of the metadata and its value."""
        key, kind, length = self._string(), int(self._number("I")), None
        if kind == _ARRAY:
            kind, length = int(self._number("I")), self._count()
        if kind not in _SCALARS and kind != _STRING:
            what = f"GGUF type {kind}" if length is None else f"an array of {length:,} of GGUF type {kind}"
            raise ConfigError(
                f"{str(self._file)!r} has {key!r} as {what}; read are numbers, strings and arrays of these: fetch the "
                "file again"
            )
        if length is None:
            return key, self._value(kind)
        self._skip(kind, length)
        return key, GgufArray(length)

    def _value(self, kind: int) -> int | float | bool | str:
        return self._string() if kind == _STRING else self._number(_SCALARS[kind])

    def _skip(self, kind: int, length: int) -> None:
        if kind in _SCALARS:
            self._stream.seek(length * struct.calcsize(_SCALARS[kind]), 1)
            return
        for _ in range(length):
            self._string()

    def _string(self) -> str:
        return self._bytes(self._count()).decode("utf-8")

    def _count(self) -> int:
        count = int(self._number("Q"))
        if count > _MAX_COUNT:
            raise struct.error
        return count

    def _number(self, kind: str) -> int | float | bool:
        number: int | float | bool = struct.unpack(f"<{kind}", self._bytes(struct.calcsize(kind)))[0]
        return number

    def _bytes(self, count: int) -> bytes:
        content = self._stream.read(count)
        if len(content) < count:
            raise struct.error
        return content

"""Header of a GGUF file: its metadata, and its tensors' names and shapes.

It refuses files that cannot be served before any weight is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO

from protos.errors import ConfigError

# llama.cpp requires these too: the sizes of every model, those for these weights, and one epsilon.
_SIZES = ("context_length", "embedding_length", "block_count")
_SIZES_OF = {"attn_q": "attention.head_count", "attn_qkv": "attention.head_count", "ffn_down": "feed_forward_length"}
_OPTIONAL = ("attention.head_count_kv", "rope.freq_base")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_TOKENS = "tokenizer.ggml.tokens"
_TOKEN_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")

BLOCKS = {  # numbers and bytes of a block, by its type's name
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


Value = bool | int | float | str | range  # an array is a range of its length, since its contents are not read


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's name, type name and shape, rows first."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def num_numbers(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's metadata and its tensors."""

    file: Path
    values: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """The family's name in llama.cpp."""
        return str(self.values.get("general.architecture", ""))

    @property
    def epsilon(self) -> float | None:
        """The epsilon of the norms, or None."""
        return next((number for key in _EPSILONS if (number := self.number(key)) is not None), None)

    def value(self, key: str) -> Value | None:
        """Return the value of an architecture key (given without its prefix), or None."""
        return self.values.get(f"{self.architecture}.{key}")

    def number(self, key: str) -> float | None:
        """Return the positive number of an architecture key; None if it is absent or an array with one per layer.

        Raises:
            ConfigError: the value is not a positive number.
        """
        value = self.value(key)
        if value is None or isinstance(value, range):
            return None
        if isinstance(value, int | float) and 0 < value < math.inf:
            return value
        raise _unfit(self.file, f"{self.architecture}.{key}", value, "a positive number")

    def token_id(self, role: str) -> int | None:
        """Return the id of a special token (`eos`), or None.

        Raises:
            ConfigError: the tokenizer has no such id.
        """
        key, tokens = f"tokenizer.ggml.{role}_token_id", self.values.get(_TOKENS)
        value, num_tokens = self.values.get(key), len(tokens) if isinstance(tokens, range) else 0
        if value is None or (isinstance(value, int) and 0 <= value < num_tokens):
            return value
        raise _unfit(self.file, key, value, f"an id of one of its {num_tokens:,} tokens")


def check_sizes(header: GgufHeader) -> None:
    """Raise ConfigError if the file lacks a size of its model: transformers would use its family's default."""
    if not header.architecture:
        raise _unfit(header.file, "general.architecture", None, "the name of a family")
    kinds = {tensor.name.split(".")[-2] for tensor in header.tensors if tensor.name.endswith(".weight")}
    for key in (*_SIZES, *(key for kind, key in _SIZES_OF.items() if kind in kinds)):
        value = header.value(key)
        if not isinstance(value, range):  # an array has one per layer
            positive_integer(header.file, f"{header.architecture}.{key}", value)
    if (num_blocks := header.number("block_count") or 0) > len(header.tensors):
        limit = f"at most the number of its tensors, {len(header.tensors):,}"
        raise _unfit(header.file, f"{header.architecture}.block_count", num_blocks, limit)
    for key in _OPTIONAL:
        header.number(key)
    if header.epsilon is None:
        keys = " or ".join(f"{header.architecture}.{key}" for key in _EPSILONS)
        raise _unfit(header.file, keys, None, "a positive number")


def check_tokenizer(header: GgufHeader) -> None:
    """Raise ConfigError for a file without a tokenizer, or with a special token that the tokenizer lacks."""
    if missing := {"tokenizer.ggml.model", _TOKENS} - set(header.values):
        raise ConfigError(
            f"{str(header.file)!r} has no tokenizer ({min(missing)} is missing); use a file with one, or convert "
            "the original checkpoint"
        )
    for role in _TOKEN_IDS:
        header.token_id(role)


def positive_integer(file: Path, key: str, value: Value | None) -> int:
    """Return the value of a key, or raise ConfigError if it is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unfit(file, key, value, "a positive integer")
    return value


def _unfit(file: Path, key: str, value: Value | None, wanted: str) -> ConfigError:
    found = f"has no {key}" if value is None else f"has {key} {value!r}"
    return ConfigError(f"{str(file)!r} {found}; it must be {wanted}: convert the original checkpoint again")


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
        return key, range(length)

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

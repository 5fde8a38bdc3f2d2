"""Metadata of a GGUF file, its tensors' names and shapes, and checks that they describe a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A metadata array; only its length is read."""

    length: int


Value = bool | int | float | str | GgufArray


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
        if value is None or isinstance(value, GgufArray):
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
        value, num_tokens = self.values.get(key), tokens.length if isinstance(tokens, GgufArray) else 0
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
        if not isinstance(value, GgufArray):  # an array has one per layer
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

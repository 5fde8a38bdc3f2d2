"""KV blocks that stay in a prefill replica's memory until a pair has read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DirectBlocks:
    """A reference to blocks. `metadata` is Ray's, and is valid until the sender releases the blocks."""

    key: str
    metadata: Any


@dataclass(frozen=True, slots=True)
class DirectStats:
    """The number of chunks offered since the start, and the bytes that are not released yet."""

    num_chunks: int = 0
    kept_bytes: int = 0

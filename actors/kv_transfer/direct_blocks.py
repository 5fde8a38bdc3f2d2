"""KV blocks that are not sent: they stay in a prefill replica's memory until a pair has read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DirectBlocks:
    """The place of blocks: `metadata` is Ray's, and is valid until the sender releases them."""

    key: str
    metadata: Any


@dataclass(frozen=True, slots=True)
class DirectStats:
    """Chunks offered since the process started, and bytes of those that are not released yet."""

    num_chunks: int = 0
    kept_bytes: int = 0

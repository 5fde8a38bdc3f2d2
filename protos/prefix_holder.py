"""The worker that holds a prompt's prefix, as the index tells it to another worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker that has reported the first `num_blocks` blocks of a prompt; some may be evicted by now."""

    worker_id: str
    num_blocks: int

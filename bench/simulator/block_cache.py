"""The prefix cache of a simulated worker: a bounded set of blocks, the least recently used evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from protos.block_keys import BlockKey, join_keys
from protos.cache_delta import CacheDelta


class BlockCache:
    """At most `num_blocks` blocks. Of one prompt the last block leaves first.

    It is worth nothing without those before it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[BlockKey, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockKey]:
        """Least recently used first."""
        return iter(self._blocks)

    def put(self, keys: Sequence[BlockKey]) -> CacheDelta:
        """Make the blocks of one prompt the most recently used ones, and evict what no longer fits."""
        blocks = self._blocks
        fitting = keys[: self._num_blocks]
        stored = join_keys(key for key in fitting if key not in blocks)
        for key in reversed(fitting):
            blocks[key] = None
            blocks.move_to_end(key)
        removed = join_keys(blocks.popitem(last=False)[0] for _ in range(len(blocks) - self._num_blocks))
        return CacheDelta(stored, removed)

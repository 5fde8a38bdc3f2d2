"""Physical blocks without sequences: their reference counts, known contents, and eviction order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from protos.block_keys import BlockKey


@dataclass(frozen=True, slots=True)
class KVMove:
    """A simultaneous move of one sequence's KV: all sources are read before any target is written.

    Attributes:
        block_table: the sequence's blocks.
        from_indices: sources, counted from the sequence's first slot.
        to_indices: one target per source.
    """

    block_table: Seq[int]
    from_indices: Seq[int]
    to_indices: Seq[int]

    def slot(self, kv_index: int, block_size: int) -> int:
        """Return the pool's slot of a KV index."""
        return self.block_table[kv_index // block_size] * block_size + kv_index % block_size


def compaction(block_table: Seq[int], tree_start: int, path: Seq[int]) -> KVMove | None:
    """Return the move that turns the nodes of `path` into a chain at `tree_start`; None if they already are one.

    The tree's nodes are stored from KV index `tree_start` on. Nodes in their final place do not move.
    """
    misplaced = [(node, depth) for depth, node in enumerate(path) if node != depth]
    if not misplaced:
        return None
    sources = [tree_start + node for node, _ in misplaced]
    return KVMove(tuple(block_table), sources, [tree_start + depth for _, depth in misplaced])


@dataclass(frozen=True, slots=True)
class BlockContent:
    """The tokens of a full block that follows the prefix ending with block `parent`. Equal contents mean equal KV."""

    key: BlockKey
    parent: BlockKey
    token_ids: tuple[int, ...]


class BlockPool:
    """N blocks, each in exactly one of three states.

        blank free   not held, without reusable content
        cached free  not held, but has a key and can be held again
        in use       held `ref_count` times, with or without a key

    `_free` keeps both kinds of free blocks in the order they are allocated: blank ones, then cached ones from the least
    to the most recently used. Every operation costs O(1) per block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._by_key: dict[BlockKey, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._doomed: set[int] = set()  # in use, with a key; blank once free

    @property
    def num_free_blocks(self) -> int:
        """Blank and cached blocks together: the limit of `take`."""
        return len(self._free)

    @property
    def keys(self) -> frozenset[BlockKey]:
        """Keys of all registered blocks, free or in use."""
        return frozenset(self._by_key)

    def is_free(self, block_id: int) -> bool:
        """True if no sequence holds the block."""
        return self._ref_counts[block_id] == 0

    def find(self, content: BlockContent) -> int | None:
        """Return the block with exactly this content. Its tokens are compared, so an equal key alone is not a hit."""
        block_id = self._by_key.get(content.key)
        return block_id if block_id is not None and self._contents[block_id] == content else None

    def register(self, block_id: int, content: BlockContent) -> bool:
        """Let `find` return this block in use; return False and change nothing if another block has the key."""
        if self._by_key.setdefault(content.key, block_id) != block_id:
            return False
        self._contents[block_id] = content
        return True

    def take(self, num_blocks: int, after: int | None) -> tuple[list[int], tuple[BlockKey, ...]]:
        """Hold `num_blocks` free blocks once each, in ascending runs; return them, and the keys of evicted contents.

        Blank blocks directly after block `after` are preferred: the CPU's attention reads a contiguous run in place.
        The caller has checked `num_free_blocks`.
        """
        block_ids = self._take_run(num_blocks, after)
        oldest = sorted(self._free.popitem(last=False)[0] for _ in range(num_blocks - len(block_ids)))
        evicted_keys = tuple(self._forget(block_id) for block_id in oldest if self._contents[block_id] is not None)
        block_ids += oldest
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids, evicted_keys

    def hold(self, block_id: int) -> None:
        """Hold a registered block once more."""
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
        self._ref_counts[block_id] += 1

    def forget_all(self) -> None:
        """Forget the contents of all blocks, held or free."""
        self._contents = [None] * self.num_blocks
        self._by_key.clear()
        self._doomed.clear()

    def doom(self, block_id: int) -> None:
        """Forget a registered block in use, and all its descendants, once its last holder drops it."""
        self._doomed.add(block_id)

    def drop(self, block_id: int) -> tuple[BlockKey, ...]:
        """Release one hold; the last makes the block free, and most recently used if it has a key.

        Returns the keys forgotten because the block was doomed.
        """
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] > 0:
            return ()
        self._free[block_id] = None
        if block_id in self._doomed:
            self._doomed.remove(block_id)
            return self._forget_branch(block_id)
        if self._contents[block_id] is None:
            self._free.move_to_end(block_id, last=False)
        return ()

    def check_integrity(self, ref_counts: list[int]) -> None:
        """Assert the pool's invariants, given how often the sequences hold each block."""
        assert self._ref_counts == ref_counts, "reference counts differ from the block tables"
        assert set(self._free) == {i for i, count in enumerate(ref_counts) if count == 0}, "a free block is held"
        registered = {content.key: i for i, content in enumerate(self._contents) if content is not None}
        assert self._by_key == registered, "keys and contents differ"
        is_cached = [self._contents[block_id] is not None for block_id in self._free]
        assert is_cached == sorted(is_cached), "a cached block would be allocated before a blank one"
        num_in_use = sum(count > 0 for count in ref_counts)
        assert is_cached.count(False) + is_cached.count(True) + num_in_use == self.num_blocks, "a block is lost"

    def check_parents(self, root_keys: frozenset[BlockKey]) -> None:
        """Assert that registered blocks form trees under `root_keys`, and that parents outlive their children."""
        ages = {block_id: age for age, block_id in enumerate(self._free)}
        for block_id, content in enumerate(self._contents):
            if content is None or content.parent in root_keys:
                continue
            parent_id = self._by_key.get(content.parent)
            assert parent_id is not None, "a registered block has lost its parent"
            assert ages.get(block_id, -1) < ages[parent_id] if parent_id in ages else True, "a parent would go first"

    def _take_run(self, num_blocks: int, after: int | None) -> list[int]:
        run: list[int] = []
        candidate = self.num_blocks if after is None else after + 1
        while len(run) < num_blocks and candidate in self._free and self._contents[candidate] is None:
            del self._free[candidate]
            run.append(candidate)
            candidate += 1
        return run

    def _forget_branch(self, block_id: int) -> tuple[BlockKey, ...]:
        """Make a free block and its descendants blank. They are free too: holders of a block hold its parent."""
        content = self._contents[block_id]
        assert content is not None
        children = [index for index, each in enumerate(self._contents) if each and each.parent == content.key]
        keys = [key for child in children for key in self._forget_branch(child)]
        self._free.move_to_end(block_id, last=False)
        return (*keys, self._forget(block_id))

    def _forget(self, block_id: int) -> BlockKey:
        content = self._contents[block_id]
        assert content is not None
        self._contents[block_id] = None
        del self._by_key[content.key]
        return content.key

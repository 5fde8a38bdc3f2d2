"""The logical side of paged KV: the positions and sequence of each block, and prefix sharing.

It does not know tensors; `engine.kv_cache.pool` gives each block id its memory. The target and the draft model each
have one manager and one pool.

        sequence A   [ 3 ][ 4 ][ 5 ]          blocks 3 and 4 hold a full, committed prefix: they have keys and
        sequence B   [ 3 ][ 4 ][ 9 ]          are shared; 5 and 9 are private and still being written
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from engine.kv_cache.block_pool import BlockContent, BlockPool
from engine.kv_cache.state_pool import StateSlots
from engine.sequence.sequence import ZEROS, TokenBlocks
from protos.block_keys import BlockKey, CacheDelta, child_key, join_keys, root_key

CacheDeltaSink = Callable[[CacheDelta], None]
StoredSink = Callable[[list[BlockContent], BlockKey], None]  # with the key of the parent of the first block


class BlockManager:
    """Block tables of all sequences over one pool, with copy-free prefix sharing.

    Full blocks of committed tokens get a chained key (`protos.block_keys`). They stay findable by it after the last
    sequence has released them, until their memory is needed: least recently used first. A sequence's keyed blocks are
    its leading `num_keyed_blocks`; a keyed block is never written again, and its parent keeps a key as long as it does.

    Conservation, at any time: blank free + cached free + in use = `num_blocks`.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        model_version: part of every key; two models never share a block.
        states: the slots of recurrent layers' states; None for models without such layers. A prefix is then adopted
            up to its last block with a snapshot.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        model_version: str,
        states: StateSlots | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_queried_tokens = 0  # tokens of all adoptions; the next counts the tokens found
        self.num_hit_tokens = 0
        self._model_version = model_version
        self._sinks: list[CacheDeltaSink] = []
        self.on_stored: StoredSink | None = None  # gets the contents of blocks without a salt that become findable
        self._pool = BlockPool(num_blocks)
        self._states = states

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, with or without a key."""
        return self._pool.num_free_blocks

    @property
    def cached_keys(self) -> frozenset[BlockKey]:
        """Keys of all findable blocks: the sum of the emitted deltas."""
        return self._pool.keys

    def prefix_keys(self, tokens: TokenBlocks) -> tuple[BlockKey, ...]:
        """Keys of all full blocks of the tokens, as used to publish and to look up."""
        return tuple(self._content(tokens, i).key for i in range(len(tokens.token_ids) // self.block_size))

    def adopt_prefix(self, tokens: TokenBlocks) -> int:
        """Give a sequence without blocks the longest cached prefix of its tokens; return its number of tokens.

        Sets `block_table` and `num_computed_tokens`. One token at least is left to compute: its logits are needed.
        """
        return self._adopt(tokens, self._match_prefix(tokens))

    def cached_blocks(self, tokens: TokenBlocks) -> list[int]:
        """Return the ids of the leading findable full blocks, valid until blocks are next reserved."""
        return self._match(tokens, len(tokens.token_ids) // self.block_size)

    def num_cached_tokens(self, tokens: TokenBlocks) -> int:
        """Return how many tokens the sequence would adopt if it were admitted now; changes nothing."""
        return len(self._match_prefix(tokens)) * self.block_size

    def admit(self, tokens: TokenBlocks, num_spare_blocks: int = 0) -> bool:
        """Adopt the cached prefix and reserve slots for all committed tokens; on False nothing changes.

        Fails unless `num_spare_blocks` remain free.
        """
        matched = self._match_prefix(tokens)
        if not self._has_room(tokens, matched, num_spare_blocks):
            return False
        self._adopt(tokens, matched)
        return self.reserve(tokens, len(tokens.token_ids))

    def can_admit(self, tokens: TokenBlocks, num_spare_blocks: int = 0) -> bool:
        """True if `admit` would succeed; changes nothing."""
        return self._has_room(tokens, self._match_prefix(tokens), num_spare_blocks)

    def reserve(self, tokens: TokenBlocks, num_tokens: int) -> bool:
        """Give positions [0, num_tokens) slots; return False and change nothing if the pool is too small."""
        table = tokens.block_table
        num_missing = -(-num_tokens // self.block_size) - len(table)
        if num_missing <= 0:
            return True
        if num_missing > self.num_free_blocks:
            return False
        block_ids, evicted_keys = self._pool.take(num_missing, after=table[-1] if table else None)
        table.extend(block_ids)
        self._forget(evicted_keys)
        return True

    def num_available_slots(self, tokens: TokenBlocks) -> int:
        """Return the largest `num_tokens` that `reserve` can grant now."""
        return (len(tokens.block_table) + self.num_free_blocks) * self.block_size

    def publish(self, tokens: TokenBlocks, num_tokens: int) -> None:
        """Give the full blocks among the first `num_tokens` tokens their keys, so that other sequences can adopt them.

        The tokens must be committed, and their KV written before or by the coming pass. Every layer writes before it
        reads, so a sequence of the same pass may adopt them too. If an equal block already has the key, this sequence
        switches to it and frees its own copy, but only after computing the copy: earlier it would write into the other
        block.
        """
        num_full = 0 if tokens.is_private else num_tokens // self.block_size
        if tokens.num_keyed_blocks >= num_full:
            return
        stored: list[BlockContent] = []
        for index in range(tokens.num_keyed_blocks, num_full):
            content = self._content(tokens, index)
            if self._pool.register(tokens.block_table[index], content):
                stored.append(content)
            elif not self._change_over(tokens, index, content):
                break
            tokens.num_keyed_blocks += 1
        if stored:
            self._emit(CacheDelta(stored=join_keys(content.key for content in stored)))
            if self.on_stored is not None and not tokens.cache_salt:
                self.on_stored(stored, root_key(self._model_version))

    def catch_up(self, tokens: TokenBlocks) -> None:
        """Switch to blocks that others published after a sequence's computed tokens, which end at a block boundary.

        Advances `num_computed_tokens`; the last token is left to compute. Recurrent layers continue from the snapshot
        of the last block, or not at all.
        """
        first = tokens.num_computed_tokens // self.block_size
        if first != tokens.num_keyed_blocks or tokens.is_private:
            return
        end = len(self._with_snapshot(tokens, self._match(tokens, self._num_adoptable(tokens))))
        if end <= first:
            return
        tokens.num_computed_tokens = end * self.block_size
        self.num_hit_tokens += (end - first) * self.block_size
        self.publish(tokens, tokens.num_computed_tokens)
        if self._states is not None:
            tokens.states[tokens.num_computed_tokens] = self._states.adopt(tokens.block_keys[end - 1])
            self._drop_states(tokens, keep=tokens.num_computed_tokens)

    def is_equal_block(self, first: TokenBlocks, second: TokenBlocks, index: int) -> bool:
        """True if full block `index` of both is equal and would be shared."""
        return self._key(first, index) == self._key(second, index)

    @property
    def max_sequences(self) -> int | None:
        """Sequences that can run at the same time; None if only blocks limit them."""
        return None if self._states is None else self._states.max_sequences

    def plan_chunk_states(self, tokens: TokenBlocks, end: int) -> None:
        """Give slots to the state after the computed tokens up to `end`, and to those that later texts may adopt.

        These are the states after the chunk's last block boundary, and after the blocks that were cached without a
        snapshot: there the text parts from another one, as others may.
        """
        if self._states is None:
            return
        self.reserve_state(tokens, end)
        last = min(end, len(tokens.token_ids) - 1) // self.block_size * self.block_size
        for boundary in {last, tokens.num_shared_tokens}:
            if tokens.num_computed_tokens < boundary < end:
                self.plan_state(tokens, boundary)

    def plan_draft_states(self, tokens: TokenBlocks, num_drafts: int) -> int:
        """Give slots to the states after the last token and after each of its drafts; return how many drafts got one.

        The states stay until the drafts are verified: the next pass starts from the state after the last accepted one.
        """
        if self._states is None:
            return num_drafts
        end = len(tokens.token_ids)
        self.reserve_state(tokens, end)
        for count in range(num_drafts):
            if not self.plan_state(tokens, end + count + 1):
                return count
        return num_drafts

    def plan_state(self, tokens: TokenBlocks, num_tokens: int) -> bool:
        """Give the state after the first `num_tokens` tokens a slot, if each sequence can still adopt and take one."""
        if self._states is None or num_tokens in tokens.states:
            return True
        slot = self._states.take(num_spare=2 * self._states.max_sequences)
        if slot is not None:
            tokens.states[num_tokens] = slot
        return slot is not None

    def reserve_state(self, tokens: TokenBlocks, num_tokens: int) -> int:
        """Give the state after the first `num_tokens` tokens a slot, and return it."""
        assert self._states is not None, "only texts of recurrent layers have states"
        if num_tokens not in tokens.states:
            slot = self._states.take()
            assert slot is not None, "`max_sequences` guarantees a slot to each sequence"
            tokens.states[num_tokens] = slot
        return tokens.states[num_tokens]

    def keep_snapshots(self, tokens: TokenBlocks) -> None:
        """Let other sequences adopt the computed full blocks, and the states after these that have slots."""
        computed = tokens.num_computed_tokens
        self.publish(tokens, computed)
        if self._states is None:
            return
        for position, slot in tokens.states.items():
            index, rest = divmod(position, self.block_size)
            if not rest and 0 < index <= tokens.num_keyed_blocks and position <= computed:
                self._states.keep(tokens.block_keys[index - 1], slot)

    def settle_states(self, tokens: TokenBlocks) -> bool:
        """Keep the state after the computed tokens, and snapshots at their block boundaries; free all others.

        Return False if that state has no slot, so that the tokens must be computed again.
        """
        if self._states is None:
            return True
        self.keep_snapshots(tokens)
        self._drop_states(tokens, keep=tokens.num_computed_tokens)
        return tokens.num_computed_tokens in (0, *tokens.states)

    def trim(self, tokens: TokenBlocks, num_tokens: int) -> None:
        """Free the draft blocks after the first `num_tokens` slots. Committed tokens keep their blocks."""
        table = tokens.block_table
        while len(table) > self._num_blocks_for(num_tokens):
            self._pool.drop(table.pop())

    def retract(self, tokens: TokenBlocks, num_tokens: int) -> None:
        """Forget the blocks published after the first `num_tokens` tokens once no sequence holds them."""
        for block_id in tokens.block_table[num_tokens // self.block_size : tokens.num_keyed_blocks]:
            self._pool.doom(block_id)

    def forget_all(self, holders: Iterable[TokenBlocks]) -> None:
        """Make no present block findable. Those of `holders`, all sequences with blocks, stay theirs alone."""
        if self._states is not None:
            self._states.forget(self.cached_keys)
        self._pool.forget_all()
        for tokens in holders:
            tokens.num_keyed_blocks, tokens.is_private = 0, True
        self._emit(CacheDelta(is_cleared=True))

    def release(self, tokens: TokenBlocks) -> None:
        """Free all blocks; keyed ones stay findable. The last is freed first, so a prefix outlives its continuation."""
        self._forget([key for block_id in reversed(tokens.block_table) for key in self._pool.drop(block_id)])
        if self._states is not None:
            self._drop_states(tokens, keep=None)
        tokens.block_table = array("i")
        tokens.num_keyed_blocks = 0
        tokens.num_computed_tokens = 0
        tokens.is_private = False

    @contextmanager
    def scratch(self, num_blocks: int) -> Iterator[list[int]]:
        """Lend up to `num_blocks` free blocks that belong to no sequence, until the end of the `with` block."""
        block_ids, evicted_keys = self._pool.take(min(num_blocks, self.num_free_blocks), after=None)
        self._forget(evicted_keys)
        try:
            yield block_ids
        finally:
            for block_id in reversed(block_ids):
                self._pool.drop(block_id)

    @contextmanager
    def scratch_states(self, num_states: int) -> Iterator[list[int]]:
        """Lend slots of up to `num_states` states until the end of the `with` block; without states, any numbers."""
        if self._states is None:
            yield [ZEROS] * num_states
            return
        taken = (self._states.take(num_spare=2 * self._states.max_sequences) for _ in range(num_states))
        slots = [slot for slot in taken if slot is not None]
        try:
            yield slots
        finally:
            for slot in slots:
                self._states.drop(slot)

    def check_integrity(self, sequences: Sequence[TokenBlocks]) -> None:
        """Assert every invariant of this class, given all sequences that hold blocks; for tests, O(N)."""
        counts = Counter(block_id for tokens in sequences for block_id in tokens.block_table)
        self._pool.check_integrity([counts[block_id] for block_id in range(self.num_blocks)])
        for tokens in sequences:
            num_keyed, table = tokens.num_keyed_blocks, tokens.block_table
            found = [self._pool.find(self._content(tokens, index)) for index in range(num_keyed)]
            assert found == list(table[:num_keyed]), "a keyed block differs from the block that its key finds"
            is_shared = any(counts[block_id] > 1 for block_id in table[num_keyed:])
            assert tokens.is_private or not is_shared, "a block without a key is shared"
            assert len(set(table)) == len(table), "a table has a block twice"
            assert tokens.num_computed_tokens <= len(table) * self.block_size, "computed tokens have no slots"
        if self._states is not None:
            held = [slot for tokens in sequences for slot in tokens.states.values()]
            self._states.check_integrity(held, self.cached_keys)
            assert all(tokens.num_computed_tokens in (0, *tokens.states) for tokens in sequences), "a state is lost"

    def check_parents(self, root_keys: frozenset[BlockKey]) -> None:
        """Assert that keyed blocks form trees under `root_keys`, the roots of all salts in use; for tests, O(N)."""
        self._pool.check_parents(root_keys)

    def _match_prefix(self, tokens: TokenBlocks) -> list[int]:
        matched = self._match(tokens, self._num_adoptable(tokens))
        tokens.num_shared_tokens = len(matched) * self.block_size
        return self._with_snapshot(tokens, matched)

    def _with_snapshot(self, tokens: TokenBlocks, matched: list[int]) -> list[int]:
        """Return the leading blocks up to the last with a snapshot; all of them if the model keeps no states."""
        while self._states is not None and matched and not self._states.has(tokens.block_keys[len(matched) - 1]):
            matched.pop()
        return matched

    def _match(self, tokens: TokenBlocks, num_blocks: int) -> list[int]:
        matched: list[int] = []
        for index in range(num_blocks):
            block_id = self._pool.find(self._content(tokens, index))
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def _has_room(self, tokens: TokenBlocks, matched: list[int], num_spare_blocks: int) -> bool:
        num_new = self._num_blocks_for(len(tokens.token_ids)) - len(matched)
        num_revived = sum(map(self._pool.is_free, matched))
        return num_new + num_revived + num_spare_blocks <= self.num_free_blocks

    def _num_adoptable(self, tokens: TokenBlocks) -> int:
        """Number of leading blocks that may be adopted: full ones, without the last token's."""
        # A text to be scored adopts none: a cached block has no logits.
        return 0 if tokens.is_scoring else (len(tokens.token_ids) - 1) // self.block_size

    def _adopt(self, tokens: TokenBlocks, block_ids: list[int]) -> int:
        assert not tokens.block_table, "a sequence adopts before it computes"
        for block_id in block_ids:
            self._pool.hold(block_id)
        num_tokens = len(block_ids) * self.block_size
        tokens.block_table = array("i", block_ids)
        tokens.num_keyed_blocks = len(block_ids)
        tokens.num_computed_tokens = num_tokens
        if self._states is not None and block_ids:
            tokens.states[num_tokens] = self._states.adopt(tokens.block_keys[len(block_ids) - 1])
        self.num_queried_tokens += len(tokens.token_ids)
        self.num_hit_tokens += num_tokens
        return num_tokens

    def _change_over(self, tokens: TokenBlocks, index: int, content: BlockContent) -> bool:
        """Put the registered block into the table; False if keys collide or the own copy is not written yet."""
        shared_id = self._pool.find(content)
        if shared_id is None or (index + 1) * self.block_size > tokens.num_computed_tokens:
            return False
        self._pool.hold(shared_id)
        self._pool.drop(tokens.block_table[index])
        tokens.block_table[index] = shared_id
        return True

    def _content(self, tokens: TokenBlocks, index: int) -> BlockContent:
        """Content of full block `index`; call in block order. Each key is computed once per sequence."""
        token_ids = tuple(tokens.token_ids[index * self.block_size : (index + 1) * self.block_size])
        parent = self._parent_key(tokens, index)
        if index == len(tokens.block_keys):
            tokens.block_keys.append(child_key(parent, token_ids))
        return BlockContent(tokens.block_keys[index], parent, token_ids)

    def _key(self, tokens: TokenBlocks, index: int) -> BlockKey:
        while len(tokens.block_keys) <= index:
            self._content(tokens, len(tokens.block_keys))
        return tokens.block_keys[index]

    def _parent_key(self, tokens: TokenBlocks, index: int) -> BlockKey:
        return tokens.block_keys[index - 1] if index else root_key(self._model_version, tokens.cache_salt)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def add_sink(self, sink: CacheDeltaSink) -> None:
        """Send every later change of the findable blocks to `sink`, in order."""
        self._sinks.append(sink)

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        """Report blocks that can no longer be found, and drop their snapshots."""
        if keys:
            self._emit(CacheDelta(removed=join_keys(keys)))
        if self._states is not None:
            self._states.forget(keys)

    def _drop_states(self, tokens: TokenBlocks, keep: int | None) -> None:
        assert self._states is not None
        kept = {at: slot for at, slot in tokens.states.items() if at == keep}
        for position, slot in tokens.states.items():
            if position not in kept:
                self._states.drop(slot)
        tokens.states = kept

    def _emit(self, delta: CacheDelta) -> None:
        for sink in self._sinks:
            sink(delta)

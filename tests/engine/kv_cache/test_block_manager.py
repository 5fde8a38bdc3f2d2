"""Blocks are conserved, shared without copies, evicted oldest first, and never served to the wrong tokens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.kv_cache import block_manager
from engine.kv_cache.block_manager import BlockManager
from engine.sequence.sequence import TokenBlocks
from protos.block_keys import CacheDelta, block_keys, join_keys, root_key, split_keys
from tests.engine.fixtures.slow_cache import SlowCache, SlowSequence

P = 4


def make_tokens(*token_ids: int, salt: str = "") -> TokenBlocks:
    return TokenBlocks(list(token_ids), salt)


def compute(blocks: BlockManager, sequence: TokenBlocks) -> None:
    """One pass over all committed tokens."""
    blocks.publish(sequence, len(sequence.token_ids))
    sequence.num_computed_tokens = len(sequence.token_ids)


def run(blocks: BlockManager, sequence: TokenBlocks) -> TokenBlocks:
    assert blocks.admit(sequence)
    compute(blocks, sequence)
    return sequence


def replay(deltas: list[CacheDelta]) -> set[bytes]:
    """The keys that a router knows after every delta."""
    keys: set[bytes] = set()
    for delta in deltas:
        stored, removed = split_keys(delta.stored), split_keys(delta.removed)
        if delta.is_cleared:
            keys.clear()
        assert keys >= set(removed), "removed but never stored"
        keys -= set(removed)
        assert keys.isdisjoint(stored), "stored twice"
        keys |= set(stored)
    return keys


def test_siblings_share_the_blocks_of_their_prompt() -> None:
    blocks = BlockManager(16, P, "m")
    first = run(blocks, make_tokens(*range(10)))
    second = run(blocks, make_tokens(*range(10)))
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2], "the block still being written is private"
    blocks.check_integrity([first, second])


def test_a_prefix_can_be_adopted_before_the_pass_that_writes_it() -> None:
    blocks = BlockManager(16, P, "m")
    first, second = make_tokens(*range(9)), make_tokens(*range(9))
    assert blocks.admit(first)
    blocks.publish(first, 9)
    assert blocks.adopt_prefix(second) == 8


def test_one_token_is_always_left_to_compute() -> None:
    blocks = BlockManager(16, P, "m")
    run(blocks, make_tokens(*range(8)))
    second = make_tokens(*range(8))
    assert blocks.adopt_prefix(second) == 4
    assert second.num_computed_tokens == 4


def test_released_blocks_are_found_again() -> None:
    blocks = BlockManager(4, P, "m")
    first = run(blocks, make_tokens(*range(10)))
    table = list(first.block_table)
    blocks.release(first)
    assert (list(first.block_table), first.num_keyed_blocks, first.num_computed_tokens) == ([], 0, 0)
    assert blocks.num_free_blocks == 4
    second = make_tokens(*range(12))
    assert blocks.adopt_prefix(second) == 8
    assert list(second.block_table) == table[:2]


def test_the_least_recently_used_block_is_given_away_first() -> None:
    blocks = BlockManager(4, P, "m")
    old, new = run(blocks, make_tokens(*range(8))), run(blocks, make_tokens(*range(50, 58)))
    blocks.release(old)
    blocks.release(new)
    run(blocks, make_tokens(90, 91, 92))
    assert blocks.adopt_prefix(make_tokens(*range(50, 58), 0)) == 8
    assert blocks.adopt_prefix(make_tokens(*range(8), 0)) == 4, "only the end of the oldest prefix is gone"


def test_blank_blocks_are_given_away_before_cached_ones() -> None:
    blocks = BlockManager(4, P, "m")
    blocks.release(run(blocks, make_tokens(*range(8))))
    run(blocks, make_tokens(90, 91, 92, 93, 94))
    assert blocks.adopt_prefix(make_tokens(*range(8), 0)) == 8


def test_partial_blocks_are_never_published() -> None:
    blocks = BlockManager(4, P, "m")
    run(blocks, make_tokens(1, 2, 3))
    assert blocks.cached_keys == frozenset()


def test_only_what_is_asked_for_is_published() -> None:
    blocks = BlockManager(8, P, "m")
    sequence = make_tokens(*range(12))
    assert blocks.admit(sequence)
    blocks.publish(sequence, 7)
    assert blocks.cached_keys == frozenset(block_keys(range(4), P, root_key("m")))


def test_a_failed_reservation_changes_nothing() -> None:
    blocks = BlockManager(3, P, "m")
    sequence = run(blocks, make_tokens(*range(8)))
    table = list(sequence.block_table)
    assert not blocks.reserve(sequence, 13)
    assert list(sequence.block_table) == table
    assert blocks.num_free_blocks == 1


def test_a_failed_admission_changes_nothing() -> None:
    blocks = BlockManager(4, P, "m")
    holder = run(blocks, make_tokens(*range(9)))
    late = make_tokens(*range(9), salt="other")
    assert not blocks.admit(late)
    assert list(late.block_table) == []
    assert blocks.num_queried_tokens == 9
    blocks.check_integrity([holder])


def test_admission_keeps_the_spare_blocks_free() -> None:
    blocks = BlockManager(4, P, "m")
    assert not blocks.admit(make_tokens(*range(9)), num_spare_blocks=2)
    assert blocks.admit(make_tokens(*range(9)), num_spare_blocks=1)


def test_free_blocks_of_the_adopted_prefix_are_not_counted_twice() -> None:
    blocks = BlockManager(3, P, "m")
    blocks.release(run(blocks, make_tokens(*range(8))))
    assert not blocks.admit(make_tokens(*range(13))), "two cached blocks and two new ones are four"
    assert blocks.admit(make_tokens(*range(12)))


def test_blocks_follow_each_other_while_the_pool_is_fresh() -> None:
    blocks = BlockManager(16, P, "m")
    sequence = run(blocks, make_tokens(*range(10)))
    assert blocks.reserve(sequence, 30)
    assert list(sequence.block_table) == list(range(8))


def test_growth_takes_the_next_block_when_it_is_blank() -> None:
    blocks = BlockManager(16, P, "m")
    first, second = run(blocks, make_tokens(*range(8))), run(blocks, make_tokens(*range(20, 24)))
    blocks.release(first)
    blocks.reserve(second, 8)
    assert list(second.block_table) == [2, 3]


def test_tenants_with_different_salts_never_share() -> None:
    blocks = BlockManager(16, P, "m")
    run(blocks, make_tokens(*range(9), salt="a"))
    assert blocks.adopt_prefix(make_tokens(*range(9), salt="b")) == 0
    assert blocks.adopt_prefix(make_tokens(*range(9), salt="a")) == 8


def test_a_hash_collision_never_serves_a_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "child_key", lambda parent, token_ids: b"same for all")
    blocks = BlockManager(16, P, "m")
    first = run(blocks, make_tokens(*range(8)))
    other = make_tokens(*range(20, 29))
    assert blocks.adopt_prefix(other) == 0
    blocks.reserve(other, 9)
    compute(blocks, other)
    assert other.num_keyed_blocks == 0, "a key that is taken cannot be taken again"
    blocks.check_integrity([first, other])


def test_an_equal_block_computed_twice_ends_up_shared() -> None:
    blocks = BlockManager(16, P, "m")
    first, second = make_tokens(*range(5)), make_tokens(*range(5))
    for sequence in (first, second):
        assert blocks.admit(sequence)
    for sequence in (first, second):
        blocks.publish(sequence, 5)
    assert second.block_table[0] != first.block_table[0], "its own copy is written by this pass, not the shared one"
    second.num_computed_tokens = 5
    blocks.publish(second, 5)
    assert second.block_table[0] == first.block_table[0]
    blocks.check_integrity([first, second])


def test_trimming_gives_back_what_drafts_do_not_need() -> None:
    blocks = BlockManager(8, P, "m")
    sequence = run(blocks, make_tokens(*range(4)))
    blocks.reserve(sequence, 20)
    blocks.trim(sequence, 5)
    assert len(sequence.block_table) == 2
    blocks.check_integrity([sequence])


def test_forgotten_blocks_are_found_by_nobody_and_come_back_by_no_sequence_that_held_them() -> None:
    deltas: list[CacheDelta] = []
    blocks = BlockManager(8, 2, "m")
    blocks.add_sink(deltas.append)
    first, ended = run(blocks, make_tokens(1, 2, 3, 4, 5)), run(blocks, make_tokens(1, 2, 7))
    blocks.release(ended)
    sibling = run(blocks, make_tokens(1, 2, 3, 4, 6))
    assert sibling.block_table[:2] == first.block_table[:2]
    blocks.forget_all([first, sibling])
    assert replay(deltas) == blocks.cached_keys == frozenset()
    first.token_ids += [6, 7]
    assert blocks.reserve(first, 7)
    blocks.publish(first, 7)
    blocks.catch_up(first)
    assert not blocks.cached_keys
    blocks.check_integrity([first, sibling])
    again = make_tokens(1, 2, 3, 4, 5)
    assert blocks.adopt_prefix(again) == 0
    for sequence in (first, sibling):
        blocks.release(sequence)
    run(blocks, first)
    assert replay(deltas) == blocks.cached_keys != frozenset()
    blocks.check_integrity([first])


def test_hits_and_queries_are_counted_in_tokens() -> None:
    blocks = BlockManager(16, P, "m")
    run(blocks, make_tokens(*range(9)))
    run(blocks, make_tokens(*range(9)))
    assert (blocks.num_queried_tokens, blocks.num_hit_tokens) == (18, 8)


def test_deltas_carry_the_keys_of_the_blocks() -> None:
    deltas: list[CacheDelta] = []
    blocks = BlockManager(3, P, "m")
    blocks.add_sink(deltas.append)
    keys = block_keys(range(12), P, root_key("m"))
    sequence = make_tokens(*range(12))
    assert blocks.prefix_keys(sequence) == tuple(keys)
    blocks.admit(sequence)
    blocks.publish(sequence, 9)
    blocks.publish(sequence, 12)
    assert deltas == [CacheDelta(stored=join_keys(keys[:2])), CacheDelta(stored=keys[2])]
    sequence.num_computed_tokens = 12
    blocks.release(sequence)
    run(blocks, make_tokens(90))
    assert deltas[2:] == [CacheDelta(removed=keys[2])]


class BlockManagerMachine(RuleBasedStateMachine):
    """Random lives of sequences, held against `SlowCache` after every operation."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.deltas: list[CacheDelta] = []
        self.blocks = BlockManager(7, 2, "m")
        self.blocks.add_sink(self.deltas.append)
        self.slow = SlowCache(7, 2)
        self.live: list[TokenBlocks] = []
        self.roots = frozenset(root_key("m", salt) for salt in ("", "s"))

    @rule(
        target=sequences,
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "", "s"]),
        num_spare=st.integers(0, 2),
    )
    def admit(self, token_ids: list[int], salt: str, num_spare: int) -> tuple[TokenBlocks, SlowSequence]:
        pair = make_tokens(*token_ids, salt=salt), SlowSequence(salt, list(token_ids))
        is_admitted = self.slow.admit(pair[1], num_spare)
        assert self.blocks.admit(pair[0], num_spare) == is_admitted
        if is_admitted:
            self.live.append(pair[0])
        return pair

    @rule(pair=sequences, num_tokens=st.integers(1, 9))
    def compute(self, pair: tuple[TokenBlocks, SlowSequence], num_tokens: int) -> None:
        sequence, slow = pair
        if sequence not in self.live:
            return
        end = min(sequence.num_computed_tokens + num_tokens, len(sequence.token_ids))
        self.blocks.publish(sequence, end)
        self.slow.publish(slow, end)
        sequence.num_computed_tokens = slow.num_computed = end

    @rule(pair=sequences, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=3), surplus=st.integers(0, 4))
    def grow(self, pair: tuple[TokenBlocks, SlowSequence], token_ids: list[int], surplus: int) -> None:
        sequence, slow = pair
        if sequence not in self.live:
            return
        num_tokens = len(sequence.token_ids) + len(token_ids)
        is_granted = self.slow.reserve(slow, num_tokens + surplus)
        assert (num_tokens + surplus <= self.blocks.num_available_slots(sequence)) == is_granted
        assert self.blocks.reserve(sequence, num_tokens + surplus) == is_granted
        if is_granted:
            sequence.token_ids += token_ids
            slow.token_ids += token_ids

    @rule(pair=sequences)
    def trim(self, pair: tuple[TokenBlocks, SlowSequence]) -> None:
        if pair[0] in self.live:
            self.blocks.trim(pair[0], len(pair[0].token_ids))
            self.slow.trim(pair[1], len(pair[1].token_ids))

    @rule(pair=consumes(sequences))
    def release(self, pair: tuple[TokenBlocks, SlowSequence]) -> None:
        if pair[0] in self.live:
            self.live.remove(pair[0])
            self.blocks.release(pair[0])
            self.slow.release(pair[1])

    @invariant()
    def invariants_hold(self) -> None:
        self.blocks.check_integrity(self.live)
        self.blocks.check_parents(self.roots)

    @invariant()
    def the_slow_cache_agrees(self) -> None:
        keys = {block_keys(token_ids, 2, root_key("m", salt))[-1] for salt, token_ids in self.slow.cached}
        assert self.blocks.cached_keys == keys
        assert self.blocks.num_free_blocks == self.slow.num_free

    @invariant()
    def the_deltas_add_up_to_the_cache_contents(self) -> None:
        assert replay(self.deltas) == self.blocks.cached_keys


TestBlockManagerAgainstTheSlowCache = BlockManagerMachine.TestCase
TestBlockManagerAgainstTheSlowCache.settings = settings(max_examples=150, stateful_step_count=40)

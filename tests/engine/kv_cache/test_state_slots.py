"""Slots of recurrent states: who holds them, and which snapshot goes first."""

from __future__ import annotations

from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.state_pool import StateSlots
from engine.sequence.sequence import TokenBlocks
from protos.block_keys import BlockKey, child_key, root_key


def key(number: int) -> BlockKey:
    return child_key(root_key("m"), (number,))


def test_the_snapshot_least_recently_adopted_gives_way():
    slots = StateSlots(4, 1)
    for number in range(3):
        slot = slots.take()
        assert slot is not None
        slots.keep(key(number), slot)
        slots.drop(slot)
    slots.drop(slots.adopt(key(0)))
    assert slots.take() is not None
    assert [slots.has(key(number)) for number in range(3)] == [True, False, True]


def test_a_snapshot_that_a_sequence_reads_stays_and_slots_are_spared():
    slots = StateSlots(3, 1)
    first = slots.take()
    assert first is not None
    slots.keep(key(0), first)
    assert slots.num_available == 1
    assert slots.take(num_spare=1) is None
    second = slots.take()
    assert second is not None
    assert slots.take() is None
    slots.drop(first)
    assert slots.take() == first
    slots.check_integrity([first, second], frozenset())


def test_a_snapshot_goes_with_its_block():
    slots = StateSlots(2, 1)
    slot = slots.take()
    assert slot is not None
    slots.keep(key(0), slot)
    slots.drop(slot)
    slots.forget([key(0), key(1)])
    assert not slots.has(key(0))
    assert slots.num_available == 1


def test_all_sequences_that_may_run_get_states_for_all_their_drafts():
    num_sequences, num_drafts = 16, 8
    slots = StateSlots(1 + num_sequences * (2 + num_drafts + 4), num_sequences)
    manager = BlockManager(8 * num_sequences, 4, "m", states=slots)
    texts = [TokenBlocks([number] * 9) for number in range(num_sequences)]
    for text in texts:
        assert manager.reserve(text, 17)
        manager.plan_chunk_states(text, 8)
        text.num_computed_tokens = 8
        assert manager.settle_states(text)
    assert [manager.plan_draft_states(text, num_drafts) for text in texts] == [num_drafts] * num_sequences
    manager.check_integrity(texts)


def test_a_text_whose_state_was_not_kept_must_be_computed_again():
    manager = BlockManager(8, 4, "m", states=StateSlots(9, 1))
    text = TokenBlocks([1] * 9)
    assert manager.reserve(text, 9)
    manager.plan_chunk_states(text, 8)
    text.num_computed_tokens = 7
    assert not manager.settle_states(text)

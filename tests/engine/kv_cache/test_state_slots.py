"""Slots of recurrent states: who holds them, and which snapshot goes first."""

from __future__ import annotations

from engine.kv_cache.state_pool import StateSlots
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

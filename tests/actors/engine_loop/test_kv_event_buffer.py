"""What the journal makes of a cache's events: nothing lost, nothing twice."""

from actors.engine_loop.kv_event_buffer import KVEventBuffer
from protos.block_keys import split_keys
from protos.kv_events import BlocksRemoved, BlocksStored, CacheCleared

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))


def test_events_of_several_steps_become_one_delta():
    journal = KVEventBuffer()
    journal.record(BlocksStored((A,)))
    journal.record(BlocksStored((B,)))
    journal.record(BlocksRemoved((C,)))
    assert journal
    delta = journal.take()
    assert (split_keys(delta.stored), split_keys(delta.removed)) == ((A, B), (C,))
    assert not journal
    assert not journal.take()


def test_the_last_word_on_a_block_counts():
    journal = KVEventBuffer()
    journal.record(BlocksStored((A,)))
    journal.record(BlocksRemoved((A,)))
    journal.record(BlocksRemoved((B,)))
    journal.record(BlocksStored((B,)))
    assert journal.take().events() == [BlocksRemoved((A,)), BlocksStored((B,))]


def test_a_cleared_cache_is_cleared_before_what_came_after():
    journal = KVEventBuffer()
    journal.record(BlocksStored((A,)))
    journal.record(CacheCleared())
    journal.record(BlocksStored((B,)))
    assert journal.take().events() == [CacheCleared(), BlocksStored((B,))]

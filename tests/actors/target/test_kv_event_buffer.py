"""The sum that the buffer makes of a cache's deltas: nothing lost, nothing twice."""

from actors.target.engine_loop import KVEventBuffer
from protos.block_keys import CacheDelta

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))


def summed(*deltas: CacheDelta) -> CacheDelta:
    kv_events = KVEventBuffer()
    for delta in deltas:
        kv_events.record(delta)
    assert kv_events
    delta = kv_events.take()
    assert not kv_events
    assert not kv_events.take()
    return delta


def test_deltas_of_several_steps_become_one():
    steps = CacheDelta(stored=A), CacheDelta(stored=B), CacheDelta(removed=C)
    assert summed(*steps) == CacheDelta(stored=A + B, removed=C)


def test_the_latest_delta_of_a_block_counts():
    steps = CacheDelta(stored=A), CacheDelta(removed=A), CacheDelta(removed=B), CacheDelta(stored=B)
    assert summed(*steps) == CacheDelta(stored=B, removed=A)


def test_a_delta_with_both_kinds_is_taken_in_whole():
    assert summed(CacheDelta(stored=A), CacheDelta(stored=B, removed=A)) == CacheDelta(stored=B, removed=A)


def test_a_cleared_cache_keeps_only_what_came_after():
    steps = CacheDelta(stored=A), CacheDelta(is_cleared=True), CacheDelta(stored=B)
    assert summed(*steps) == CacheDelta(stored=B, is_cleared=True)

"""Rates learned from the messages of prefill replicas, on a clock that is set by hand."""

from __future__ import annotations

import pytest
import torch

from engine.remote_prefill.kv_transfer import ChunkHeader, KVChunk, RemoteLoad
from engine.remote_prefill.placement import ReplicaRates


class RatesClock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def chunk(transfer_s: float, load: RemoteLoad) -> KVChunk:
    return KVChunk(ChunkHeader(0, 0, load), torch.zeros(1, 1, dtype=torch.uint8), transfer_s)


def known_replica(clock: RatesClock) -> ReplicaRates:
    """Return the rates of an engine whose first order was accepted ten seconds ago."""
    meter = ReplicaRates(clock)
    meter.ordered(0, 16)
    meter.accepted(0, RemoteLoad("a", 0, 0.0), after_s=3.0)
    clock.now_s += 10.0
    return meter


def test_orders_that_no_replica_has_accepted_count_as_queue() -> None:
    meter = ReplicaRates(RatesClock())
    meter.ordered(1, 4000)
    meter.ordered(2, 1000)
    assert meter.outlook().num_queued_tokens == 5000
    meter.ended(2)
    assert meter.outlook().num_queued_tokens == 4000


def test_an_accepted_order_lengthens_its_replicas_queue_which_drains() -> None:
    clock = RatesClock()
    meter = known_replica(clock)
    meter.ordered(1, 4000)
    meter.accepted(1, RemoteLoad("a", 1000, 500.0), after_s=0.02)
    outlook = meter.outlook()
    assert (outlook.num_queued_tokens, outlook.tokens_per_s, outlook.call_s) == (5000, 500.0, 0.02)
    clock.now_s += 4.0
    assert meter.outlook().num_queued_tokens == 3000
    clock.now_s += 100.0
    assert meter.outlook().num_queued_tokens == 0


def test_a_new_order_meets_the_shortest_queue() -> None:
    meter = ReplicaRates(RatesClock())
    meter.arrived(chunk(0.1, RemoteLoad("a", 9000, 500.0)), 100)
    meter.arrived(chunk(0.1, RemoteLoad("b", 10, 700.0)), 100)
    outlook = meter.outlook()
    assert (outlook.num_queued_tokens, outlook.tokens_per_s) == (10, 600.0)
    assert outlook.transfer_s_per_token == pytest.approx(1e-3)


def test_a_replica_that_is_silent_for_long_is_forgotten() -> None:
    clock = RatesClock()
    meter = ReplicaRates(clock)
    meter.arrived(chunk(0.1, RemoteLoad("a", 90000, 500.0)), 100)
    clock.now_s += 31.0
    assert meter.outlook().tokens_per_s == 0.0


def test_pauses_grow_with_failures_in_a_row_and_not_with_simultaneous_ones() -> None:
    clock = RatesClock()
    meter = ReplicaRates(clock)
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert meter.gate.is_open
        for _ in range(5):
            meter.gate.failed()
        clock.now_s += pause_s - 0.01
        assert not meter.gate.is_open
        clock.now_s += 0.02
    meter.gate.succeeded()
    meter.gate.failed()
    clock.now_s += 1.01
    assert meter.gate.is_open


def test_orders_that_wait_for_the_router_to_start_do_not_count_in_the_cost_of_a_call() -> None:
    clock = RatesClock()
    meter = ReplicaRates(clock)
    load = RemoteLoad("a", 0, 500.0)
    meter.accepted(1, load, after_s=3.0)
    clock.now_s += 0.5
    meter.accepted(2, load, after_s=3.5)
    meter.accepted(3, load, after_s=0.6)
    assert meter.outlook().call_s == 0
    meter.accepted(4, load, after_s=0.4)
    assert meter.outlook().call_s == 0.4


def test_the_measured_cost_of_a_call_fades() -> None:
    clock = RatesClock()
    meter = known_replica(clock)
    load = RemoteLoad("a", 0, 500.0)
    meter.accepted(1, load, after_s=8.0)
    clock.now_s += 60.0
    assert meter.outlook().call_s == pytest.approx(0.125)

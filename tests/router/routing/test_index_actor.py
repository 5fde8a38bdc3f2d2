"""The index actor's knowledge without Ray: reports in, decisions out."""

from dataclasses import replace

import pytest

from protos.block_keys import CacheDelta, PrefixHolder, WorkerLoad, WorkerReport, join_keys
from router.config import RouterConfig
from router.routing.index import SILENCE_S, IndexState
from router.routing.routed_call import RouteQuery

KEYS = [bytes([n]) * 16 for n in range(20)]
WORKERS = ("a", "b", "c")


def report(
    worker_id: str,
    sequence: int = 0,
    *stored: bytes,
    epoch: int = 1,
    queued: int = 0,
    age_s: float = 0.0,
    is_serving: bool = True,
    snapshot: bytes | None = None,
) -> WorkerReport:
    load = WorkerLoad(worker_id, epoch, 1e9, 0, 0, queued, 0, prefill_tokens_per_s=1000.0)
    deltas = (CacheDelta(join_keys(stored)),) if stored else ()
    return WorkerReport(load, age_s, is_serving, sequence, snapshot, deltas)


def query(request_id: str = "r", *keys: bytes, refused_by: str | None = None, num_tokens: int = 160) -> RouteQuery:
    return RouteQuery(request_id, num_tokens, join_keys(keys), "", WORKERS, refused_by, is_explained=True)


@pytest.fixture
def state() -> IndexState:
    state = IndexState(RouterConfig(block_size=16))
    for worker_id in WORKERS:
        assert not state.report(report(worker_id), 100.0)
    return state


def test_a_request_goes_to_the_holder_of_its_blocks_and_the_reply_counts_them(state: IndexState):
    state.report(report("b", 1, *KEYS[:8]), 100.0)
    state.report(report("c", 1, *KEYS[:3]), 100.0)
    reply = state.select(query("r", *KEYS[:10]), 100.1)
    assert reply.worker_ids[0] == "b"
    assert set(reply.worker_ids) == set(WORKERS)
    assert (reply.predicted_blocks, reply.achievable_blocks) == (8, 8)
    assert reply.cost_s == pytest.approx(32 / 1000)
    assert reply.runner_up_cost_s > reply.cost_s
    assert reply.block_prefill_s == pytest.approx(16 / 1000)
    assert "prefill (160-128=32)/1000" in reply.formula
    assert reply.num_known_blocks == 10  # the two that are on their way included


def test_a_busy_holder_is_left_and_the_reply_counts_the_blocks_given_up(state: IndexState):
    state.report(report("b", 1, *KEYS[:8], queued=60_000), 100.0)
    reply = state.select(query("r", *KEYS[:10]), 100.0)
    assert reply.worker_ids[0] != "b"
    assert (reply.predicted_blocks, reply.achievable_blocks) == (0, 8)


def test_the_holder_of_more_blocks_than_the_chosen_worker_is_named_where_it_is_wanted(state: IndexState):
    state.report(report("b", 1, *KEYS[:8], queued=60_000), 100.0)
    state.report(report("c", 1, *KEYS[:3], queued=60_000), 100.0)
    wanted = replace(query("r", *KEYS[:10]), wants_holder=True)
    first, second = state.select(wanted, 100.0), state.select(replace(wanted, request_id="s"), 100.0)
    assert (first.worker_ids[0], first.holder) == ("a", PrefixHolder("b", 8))
    assert (second.worker_ids[0], second.holder) == ("a", None), "it is expected to hold them"
    assert state.select(query("t", *KEYS[:10]), 100.0).holder is None
    state.report(report("b", 2, queued=0), 100.0)
    state.forget("a")
    at_holder = state.select(replace(wanted, request_id="u"), 100.0)
    assert (at_holder.worker_ids[0], at_holder.holder) == ("b", None)


def test_blocks_that_were_only_predicted_make_no_holder(state: IndexState):
    state.select(query("r", *KEYS[:10]), 100.0)
    busy = replace(query("s", *KEYS[:10]), wants_holder=True, candidates=("a", "b", "c"))
    for worker_id in WORKERS:
        assert state.select(replace(busy, candidates=(worker_id,)), 100.0).holder is None


def test_a_gap_in_the_reports_asks_for_a_snapshot_until_it_comes(state: IndexState):
    assert state.report(report("a", 2), 100.0)
    assert state.report(report("a", 3), 100.0)
    assert not state.report(report("a", 4, KEYS[3], snapshot=join_keys(KEYS[:3])), 100.0)
    assert state.select(query("r", *KEYS[:4]), 100.0).predicted_blocks == 4


def test_an_index_that_was_restarted_asks_every_worker():
    state = IndexState(RouterConfig(block_size=16))
    assert state.report(report("a", 7), 100.0)


def test_a_restarted_workers_blocks_are_gone(state: IndexState):
    state.report(report("a", 1, *KEYS[:8]), 100.0)
    state.report(report("a", 0, epoch=2), 100.1)
    assert state.select(query("r", *KEYS[:8]), 100.2).predicted_blocks == 0


def test_a_worker_whose_target_is_away_is_not_chosen_while_another_serves(state: IndexState):
    state.report(report("a", 1, *KEYS[:8], is_serving=False), 100.0)
    assert "a" not in state.select(query("r", *KEYS[:8]), 100.0).worker_ids
    for worker_id in "bc":
        state.report(report(worker_id, 1, is_serving=False), 100.0)
    assert state.select(query("s", *KEYS[:8]), 100.0).worker_ids[0] == "a"


def test_a_load_counts_from_when_it_was_measured_whatever_the_workers_clock_says(state: IndexState):
    state.report(report("a", 1, queued=1000, age_s=0.5), 100.0)
    for worker_id in "bc":
        state.report(report(worker_id, 1, queued=800), 100.0)
    assert state.select(query(), 100.0).worker_ids[0] == "a"  # half of its work is done


def test_a_refusal_takes_the_reservation_back(state: IndexState):
    big = query("big", num_tokens=50_000)
    first = state.select(big, 100.0).worker_ids[0]
    state.withdraw(first, "big")
    costs = {state.select(query(f"r{n}", num_tokens=16), 100.0).worker_ids[0] for n in range(30)}
    assert first in costs


def test_a_second_query_ends_the_first_reservation(state: IndexState):
    first = state.select(query("big", num_tokens=50_000), 100.0).worker_ids[0]
    again = state.select(query("big", refused_by=first, num_tokens=50_000), 100.0)
    assert state.select(query("r", num_tokens=16), 100.0).worker_ids[0] != again.worker_ids[0]
    assert again.cost_s == pytest.approx(50.0, rel=0.1)  # nothing of it was left there


def test_silent_workers_are_forgotten_and_a_returning_one_is_asked_for_its_blocks(state: IndexState):
    state.report(report("a", 1, *KEYS[:8]), 100.0)
    state.report(report("b", 1), 100.0 + SILENCE_S)
    assert sorted(state.forget_silent(100.5 + SILENCE_S)) == ["a", "c"]
    assert state.select(query("r", *KEYS[:8]), 111.0).achievable_blocks == 0
    assert state.report(report("a", 2), 111.0)


def test_a_chosen_worker_that_never_reports_is_forgotten(state: IndexState):
    mute = RouteQuery("r", 16, b"", "", ("mute",))
    state.select(mute, 200.0)
    assert "mute" in state.forget_silent(201.0 + SILENCE_S)


@pytest.mark.parametrize("policy", ["prefix", "load", "round_robin", "random"])
def test_every_policy_replies_with_the_achievable_blocks(policy: str):
    state = IndexState(RouterConfig(block_size=16, policy=policy))
    for worker_id in WORKERS:
        state.report(report(worker_id, 0, *(KEYS[:8] if worker_id == "b" else ())), 100.0)
    chosen = {state.select(query(f"r{n}", *KEYS[:8]), 100.0 + 0.1 * n).worker_ids[0] for n in range(12)}
    assert chosen == ({"b"} if policy == "prefix" else set(WORKERS))
    assert state.select(query("r", *KEYS[:8]), 102.0).achievable_blocks == 8

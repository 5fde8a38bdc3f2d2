from collections import Counter

import pytest

from protos.block_keys import CacheDelta, WorkerLoad, join_keys
from router.config import RouterConfig
from router.routing.index import IndexState
from router.routing.policy import Decision
from router.routing.routed_call import RouteQuery

WORKERS = ("a", "b", "c", "d")


def make_state() -> IndexState:
    state = IndexState(RouterConfig(block_size=100))
    for worker_id in WORKERS:
        report(state, worker_id, 0.0)
    return state


def report(state: IndexState, worker_id: str, now_s: float) -> None:
    state.loads.update(WorkerLoad(worker_id, 0, now_s, 0, 0, 0, 0, prefill_tokens_per_s=1000.0))


def choose(
    state: IndexState, number: int, *keys: int, now_s: float, session_id: str = "", workers: tuple[str, ...] = WORKERS
) -> Decision:
    joined = join_keys(key.to_bytes(16, "little") for key in keys)
    return state.choose(RouteQuery(str(number), 1000, joined, session_id, workers), now_s)


def test_a_burst_of_different_prompts_spreads_over_all_workers():
    state = make_state()
    chosen = Counter(choose(state, n, 1000 + n, now_s=1.0).worker_id for n in range(40))
    assert set(chosen.values()) == {10}


def test_equal_prompts_follow_the_first_before_any_report():
    state = make_state()
    prefix = tuple(range(1, 9))
    first = choose(state, 0, *prefix, now_s=1.0).worker_id
    assert choose(state, 1, *prefix, now_s=1.1).worker_id == first


@pytest.mark.parametrize(("now_s", "is_expected"), [(2.9, True), (3.1, False), (100.0, False)])
def test_a_prediction_that_is_never_confirmed_fades(now_s: float, is_expected: bool):
    """A second after the first token, which takes a second here."""
    state = make_state()
    choose(state, 0, 1, 2, 3, now_s=1.0)
    decision = choose(state, 1, 1, 2, 3, now_s=now_s)
    assert bool(decision.request.prefix_blocks) is is_expected


def test_reported_blocks_attract_requests_with_their_prefix():
    state = make_state()
    keys = tuple(k.to_bytes(16, "little") for k in range(8))
    state.index.apply("c", 0, 0, (CacheDelta(stored=join_keys(keys)),))
    assert choose(state, 5, *range(8), now_s=1.0).worker_id == "c"


def test_a_session_returns_to_its_worker_among_equals():
    state = make_state()
    first = choose(state, 0, session_id="s", now_s=0.0).worker_id
    later = [choose(state, n, session_id="s", now_s=100.0 * n).worker_id for n in range(1, 10)]
    assert set(later) == {first}


def test_the_sessions_that_were_idle_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("router.routing.index._MAX_SESSIONS", 2)
    state = make_state()
    found = [choose(state, 0, session_id=name, now_s=0.0).request.last_worker_id for name in "abacacb"]
    assert [worker_id is not None for worker_id in found] == [False, False, True, False, True, True, False]


def chosen_from(state: IndexState, first: int, now_s: float) -> set[str]:
    return {choose(state, n, 1000 + n, now_s=now_s).worker_id for n in range(first, first + 8)}


def test_a_worker_that_reports_nothing_of_its_work_gets_no_more_for_a_minute():
    """A pair that was stopped went on to get its share until Serve replaced it."""
    state = make_state()
    assert chosen_from(state, 0, 1.0) == set(WORKERS)
    for worker_id in "bcd":
        report(state, worker_id, 2.0)
    assert chosen_from(state, 10, 7.0) == {"b", "c", "d"}
    report(state, "a", 8.0)
    assert "a" in chosen_from(state, 20, 8.1)
    for worker_id in "bcd":
        report(state, worker_id, 9.0)
    assert "a" in chosen_from(state, 30, 80.0), "its reports may have been lost"


def test_workers_that_are_all_silent_are_asked_all_the_same():
    state = make_state()
    assert chosen_from(state, 0, 1.0) == set(WORKERS)
    assert chosen_from(state, 10, 10.0) == set(WORKERS)


def test_only_candidates_are_chosen():
    state = make_state()
    choose(state, 0, 1, 2, 3, 4, 5, 6, now_s=1.0)
    assert all(choose(state, n, 1, 2, 3, now_s=1.0, workers=("d",)).worker_id == "d" for n in range(1, 5))

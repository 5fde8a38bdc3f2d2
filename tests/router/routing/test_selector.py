from collections import Counter
from functools import partial

import pytest

from protos.block_keys import CacheDelta, join_keys
from protos.worker_report import WorkerLoad
from router.routing.index_actor import RouteRequest, Selector
from router.routing.load import LoadTable
from router.routing.policy import CostConfig, Policy, rank
from router.routing.prefix_index import PrefixIndex

WORKERS = ("a", "b", "c", "d")


def make_selector() -> Selector:
    loads = LoadTable()
    for worker_id in WORKERS:
        loads.update(WorkerLoad(worker_id, 0, 0.0, 0, 0, 0, 0, prefill_tokens_per_s=1000.0))
    return Selector(partial(rank, Policy.PREFIX, config=CostConfig()), 100, PrefixIndex(), loads)


def request(number: int, *keys: int, session_id: str = "") -> RouteRequest:
    return RouteRequest(str(number), 1000, tuple(k.to_bytes(16, "little") for k in keys), number, session_id)


def test_a_burst_of_different_prompts_spreads_over_all_workers():
    selector = make_selector()
    chosen = Counter(selector.select(request(n, 1000 + n), WORKERS, now_s=1.0).worker_id for n in range(40))
    assert set(chosen.values()) == {10}


def test_equal_prompts_follow_the_first_before_any_report():
    selector = make_selector()
    prefix = tuple(range(1, 9))
    first = selector.select(request(0, *prefix), WORKERS, now_s=1.0).worker_id
    assert selector.select(request(1, *prefix), WORKERS, now_s=1.1).worker_id == first


@pytest.mark.parametrize(("now_s", "is_expected"), [(2.9, True), (3.1, False), (100.0, False)])
def test_a_prediction_that_is_never_confirmed_fades(now_s: float, is_expected: bool):
    """A second after the first token, which takes a second here."""
    selector = make_selector()
    selector.select(request(0, 1, 2, 3), WORKERS, now_s=1.0)
    decision = selector.select(request(1, 1, 2, 3), WORKERS, now_s=now_s)
    assert bool(decision.request.prefix_blocks) is is_expected


def test_reported_blocks_attract_requests_with_their_prefix():
    selector = make_selector()
    keys = tuple(k.to_bytes(16, "little") for k in range(8))
    selector.index.apply("c", 0, 0, (CacheDelta(stored=join_keys(keys)),))
    assert selector.select(request(5, *range(8)), WORKERS, now_s=1.0).worker_id == "c"


def test_a_session_returns_to_its_worker_among_equals():
    selector = make_selector()
    first = selector.select(request(0, session_id="s"), WORKERS, now_s=0.0).worker_id
    later = [selector.select(request(n, session_id="s"), WORKERS, now_s=100.0 * n).worker_id for n in range(1, 10)]
    assert set(later) == {first}


def test_the_sessions_that_were_idle_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("router.routing.index_actor._MAX_SESSIONS", 2)
    selector = make_selector()
    found = [selector.select(request(0, session_id=name), WORKERS, 0.0).request.last_worker_id for name in "abacacb"]
    assert [worker_id is not None for worker_id in found] == [False, False, True, False, True, True, False]


def chosen_from(selector: Selector, first: int, now_s: float) -> set[str]:
    return {selector.select(request(n, 1000 + n), WORKERS, now_s=now_s).worker_id for n in range(first, first + 8)}


def report(selector: Selector, worker_id: str, now_s: float) -> None:
    selector.loads.update(WorkerLoad(worker_id, 0, now_s, 0, 0, 0, 0, prefill_tokens_per_s=1000.0))


def test_a_worker_that_reports_nothing_of_its_work_gets_no_more_for_a_minute():
    """A pair that was stopped went on to get its share until Serve replaced it."""
    selector = make_selector()
    assert chosen_from(selector, 0, 1.0) == set(WORKERS)
    for worker_id in "bcd":
        report(selector, worker_id, 2.0)
    assert chosen_from(selector, 10, 7.0) == {"b", "c", "d"}
    report(selector, "a", 8.0)
    assert "a" in chosen_from(selector, 20, 8.1)
    for worker_id in "bcd":
        report(selector, worker_id, 9.0)
    assert "a" in chosen_from(selector, 30, 80.0), "its reports may have been lost"


def test_workers_that_are_all_silent_are_asked_all_the_same():
    selector = make_selector()
    assert chosen_from(selector, 0, 1.0) == set(WORKERS)
    assert chosen_from(selector, 10, 10.0) == set(WORKERS)


def test_only_candidates_are_chosen():
    selector = make_selector()
    selector.select(request(0, 1, 2, 3, 4, 5, 6), WORKERS, now_s=1.0)
    assert all(selector.select(request(n, 1, 2, 3), ("d",), now_s=1.0).worker_id == "d" for n in range(1, 5))

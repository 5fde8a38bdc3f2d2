from collections import Counter
from dataclasses import replace

import pytest

from protos.block_keys import WorkerLoad
from router.routing.load import FleetLoad, LoadTable
from router.routing.policy import Policy, PolicyInput, cost_terms, rank

REQUEST = PolicyInput(num_tokens=1000, block_size=100, prefix_blocks={}, seed=1)


def load(worker_id: str, tokens: int = 0, *, rate: float = 1000.0, decode: int = 0, speed: float = 50.0) -> WorkerLoad:
    return WorkerLoad(worker_id, 0, 0.0, 0, 0, tokens, decode, rate, 1e-4, speed)


def fleet(*loads: WorkerLoad) -> FleetLoad:
    table = LoadTable()
    for signal in loads:
        table.update(signal)
    return table.view([signal.worker_id for signal in loads], 0.0)


def test_the_cost_is_queue_prefill_interference_and_what_others_pay():
    terms = cost_terms(replace(REQUEST, prefix_blocks={"a": 4}), fleet(load("a", 500, decode=2000)))
    assert terms.queue_s[0] == pytest.approx(0.5)
    assert terms.prefill_s[0] == pytest.approx(0.6)
    assert terms.interference_s[0] == pytest.approx(1.1 * 1e-4 * 2000)
    assert terms.others_s[0] == pytest.approx(0.9)
    assert terms.ttft_s[0] == pytest.approx(1.1 + 0.22)
    assert terms.total_s[0] == pytest.approx(1.1 + 0.22 + 0.9)


def test_the_last_token_is_always_computed():
    terms = cost_terms(replace(REQUEST, prefix_blocks={"a": 10}), fleet(load("a")))
    assert terms.cached_tokens[0] == 900


def test_a_request_goes_where_its_prefix_is():
    decision = rank(Policy.PREFIX, replace(REQUEST, prefix_blocks={"b": 8}), fleet(load("a"), load("b", 300)))
    assert decision.worker_id == "b"


def test_a_prefix_is_left_when_waiting_for_it_costs_more():
    decision = rank(Policy.PREFIX, replace(REQUEST, prefix_blocks={"b": 8}), fleet(load("a"), load("b", 5000)))
    assert decision.worker_id == "a"


def test_others_count_only_as_far_as_workers_are_busy():
    request = replace(REQUEST, prefix_blocks={"b": 5})
    half_busy = cost_terms(request, fleet(load("a"), load("b", 900)))
    assert half_busy.others_s.tolist() == [pytest.approx(0.75), pytest.approx(0.375)]
    assert cost_terms(request, fleet(load("a"), load("b"))).others_s.tolist() == [0.0, 0.0]


def test_blocks_that_can_be_fetched_cost_a_part_everywhere():
    request = replace(REQUEST, prefix_blocks={"b": 8})
    workers = fleet(load("a"), load("b", 500))
    assert rank(Policy.PREFIX, request, workers).worker_id == "b"
    decision = rank(Policy.PREFIX, replace(request, fetch_share=0.25), workers)
    assert decision.worker_id == "a"
    assert decision.terms.prefill_s.tolist() == [pytest.approx(0.4), pytest.approx(0.2)]
    assert "prefill (1000-0-600=400)/1000" in decision.explain()


def test_the_load_policy_ignores_prefixes():
    decision = rank(Policy.LOAD, replace(REQUEST, prefix_blocks={"b": 9}), fleet(load("a"), load("b", 100)))
    assert decision.worker_id == "a"


def test_the_load_policy_takes_the_least_loaded_worker_where_costs_are_close() -> None:
    """Costs within 20 ms are alike for a hot prefix, and not for the load."""
    loads = fleet(load("a", 8), replace(load("b"), num_running_requests=3))
    short = replace(REQUEST, num_tokens=100)
    assert rank(Policy.LOAD, short, loads).worker_id == "b"
    assert rank(Policy.PREFIX, short, loads).worker_id == "a"


def test_a_faster_worker_is_preferred_for_the_same_work():
    decision = rank(Policy.PREFIX, REQUEST, fleet(load("slow", 100), load("fast", 300, rate=4000.0)))
    assert decision.worker_id == "fast"


def test_running_streams_raise_the_cost():
    decision = rank(Policy.PREFIX, REQUEST, fleet(load("a", decode=50_000), load("b", 200)))
    assert decision.worker_id == "b"


def test_the_faster_decoder_wins_among_equal_workers():
    workers = fleet(load("a", speed=50.0), load("b", speed=80.0), load("c", speed=50.0))
    assert all(rank(Policy.PREFIX, replace(REQUEST, seed=s), workers).worker_id == "b" for s in range(20))


def test_the_sessions_worker_wins_among_equal_workers_only():
    sticky = replace(REQUEST, last_worker_id="b")
    equal = fleet(load("a"), load("b"), load("c"))
    assert all(rank(Policy.PREFIX, replace(sticky, seed=s), equal).worker_id == "b" for s in range(20))
    assert rank(Policy.PREFIX, sticky, fleet(load("a"), load("b", 500))).worker_id == "a"
    for num_more, worker_id in ((1, "b"), (2, "a")):
        busier = fleet(load("a"), replace(load("b"), num_running_requests=num_more))
        assert rank(Policy.PREFIX, sticky, busier).worker_id == worker_id


def test_equal_workers_are_shuffled_evenly_and_reproducibly():
    workers = fleet(*(load(name) for name in "abcd"))
    chosen = [rank(Policy.PREFIX, replace(REQUEST, seed=seed), workers).worker_id for seed in range(2000)]
    again = [rank(Policy.PREFIX, replace(REQUEST, seed=seed), workers).worker_id for seed in range(2000)]
    assert chosen == again
    assert all(420 <= count <= 580 for count in Counter(chosen).values())
    assert len(Counter(chosen)) == 4


def test_the_shuffle_depends_on_worker_ids_not_on_their_order():
    forth, back = fleet(load("a"), load("b"), load("c")), fleet(load("c"), load("b"), load("a"))
    for seed in range(20):
        request = replace(REQUEST, seed=seed)
        assert rank(Policy.RANDOM, request, forth).worker_id == rank(Policy.RANDOM, request, back).worker_id


def test_round_robin_takes_turns():
    workers = fleet(load("a", 9000), load("b"), load("c"))
    chosen = [rank(Policy.ROUND_ROBIN, replace(REQUEST, turn=turn), workers).worker_id for turn in range(6)]
    assert chosen == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("policy", list(Policy))
def test_every_policy_ranks_every_worker_once(policy: Policy):
    workers = fleet(*(load(name, 100 * place) for place, name in enumerate("abcdefg")))
    decision = rank(policy, replace(REQUEST, prefix_blocks={"e": 3}), workers)
    assert sorted(workers.worker_ids[row] for row in decision.order) == list("abcdefg")


def test_workers_are_ranked_by_cost():
    workers = fleet(load("a", 900), load("b", 100), load("c", 500))
    decision = rank(Policy.PREFIX, REQUEST, workers)
    assert [workers.worker_ids[row] for row in decision.order] == ["b", "c", "a"]
    terms, best = decision.terms, decision.order[0]
    assert terms.total_s[best] == pytest.approx(1.1 + 1.5)  # all have a backlog: the whole prefill delays others
    assert terms.ttft_s[best] == pytest.approx(1.1)


def test_holders_that_are_no_candidates_are_ignored():
    decision = rank(Policy.PREFIX, replace(REQUEST, prefix_blocks={"gone": 9}), fleet(load("a"), load("b")))
    assert decision.worker_id in {"a", "b"}


def test_a_decision_explains_itself_with_its_numbers():
    decision = rank(Policy.PREFIX, replace(REQUEST, prefix_blocks={"a": 4}), fleet(load("a", 500)))
    assert decision.explain() == (
        "prefix: a 2.0000 s = queue 500/1000 + prefill (1000-400=600)/1000"
        " + interference 0.0000 (0 decode tokens) + others 0.9000"
    )

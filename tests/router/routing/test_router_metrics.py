from dataclasses import replace

from prometheus_client import CollectorRegistry

from router.routing.request_routing import RouterMetrics
from router.routing.routed_call import RouteReply

REPLY = RouteReply(
    predicted_blocks=8,
    achievable_blocks=10,
    cost_s=1.0,
    runner_up_cost_s=1.5,
    block_prefill_s=0.1,
    worker_ids=("a", "b"),
    formula="",
    num_known_blocks=10,
    num_doubtful_workers=0,
)
OUTCOME = REPLY, 8


def metrics_after(*outcomes: tuple[RouteReply, int]) -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for reply, num_found in outcomes:
        metrics.record_outcome(reply, num_found)
    return registry


def is_blind_after(*outcomes: tuple[RouteReply, int]) -> bool:
    return metrics_after(*outcomes).get_sample_value("outrider_router_blind") == 1.0


def num_stale_and_misrouted(reply: RouteReply, num_found: int) -> tuple[float | None, ...]:
    registry = metrics_after((reply, num_found))
    names = ("outrider_router_stale_answers_total", "outrider_router_misroutes_total")
    return tuple(registry.get_sample_value(name) for name in names)


def test_a_prediction_that_the_engine_refutes_is_stale() -> None:
    assert num_stale_and_misrouted(REPLY, 6) == (1, 0)
    assert num_stale_and_misrouted(REPLY, 8) == (0, 0)


def test_a_misroute_is_a_stale_prediction_that_changed_the_choice() -> None:
    assert num_stale_and_misrouted(REPLY, 2) == (1, 1)
    assert num_stale_and_misrouted(replace(REPLY, runner_up_cost_s=float("inf")), 2) == (1, 0)


def test_repeated_hits_on_blocks_thought_cold_are_blindness() -> None:
    unforeseen = replace(REPLY, predicted_blocks=0), 5
    assert not is_blind_after(*[unforeseen] * 19)
    assert is_blind_after(*[unforeseen] * 20)
    assert is_blind_after(OUTCOME, *[unforeseen] * 20)


def test_an_expected_hit_ends_the_alarm_and_arms_it_again() -> None:
    unforeseen = replace(REPLY, predicted_blocks=0), 5
    expected = replace(REPLY, predicted_blocks=5), 5
    assert not is_blind_after(*[unforeseen] * 20, expected)
    assert not is_blind_after(*[unforeseen] * 20, expected, *[unforeseen] * 19)
    assert is_blind_after(*[unforeseen] * 20, expected, *[unforeseen] * 20)

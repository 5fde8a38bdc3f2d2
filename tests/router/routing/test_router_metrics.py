from dataclasses import replace

from prometheus_client import CollectorRegistry

from router.routing.request_routing import RouterMetrics
from router.routing.routed_call import RouteOutcome, RouteReply

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
OUTCOME = RouteOutcome(REPLY, achieved_blocks=8)


def is_blind_after(*outcomes: RouteOutcome) -> bool:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for outcome in outcomes:
        metrics.record_outcome(outcome)
    return registry.get_sample_value("outrider_router_blind") == 1.0


def test_a_prediction_that_the_engine_refutes_is_stale():
    broken = replace(OUTCOME, achieved_blocks=6)
    assert broken.is_stale
    assert not OUTCOME.is_stale
    assert not broken.is_misroute


def test_a_misroute_is_a_stale_prediction_that_changed_the_choice():
    assert replace(OUTCOME, achieved_blocks=2).is_misroute
    assert not RouteOutcome(replace(REPLY, runner_up_cost_s=float("inf")), achieved_blocks=2).is_misroute


def test_repeated_hits_on_blocks_thought_cold_are_blindness():
    unforeseen = RouteOutcome(replace(REPLY, predicted_blocks=0), achieved_blocks=5)
    assert not is_blind_after(*[unforeseen] * 19)
    assert is_blind_after(*[unforeseen] * 20)
    assert is_blind_after(OUTCOME, *[unforeseen] * 20)


def test_an_expected_hit_ends_the_alarm_and_arms_it_again():
    unforeseen = RouteOutcome(replace(REPLY, predicted_blocks=0), achieved_blocks=5)
    expected = RouteOutcome(replace(REPLY, predicted_blocks=5), achieved_blocks=5)
    assert not is_blind_after(*[unforeseen] * 20, expected)
    assert not is_blind_after(*[unforeseen] * 20, expected, *[unforeseen] * 19)
    assert is_blind_after(*[unforeseen] * 20, expected, *[unforeseen] * 20)

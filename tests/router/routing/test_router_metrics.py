from dataclasses import replace

from router.routing.routed_call import RouteOutcome, RouteReply
from router.routing.router_metrics import RouteAudit

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


def audit_of(*outcomes: RouteOutcome) -> RouteAudit:
    audit = RouteAudit()
    for outcome in outcomes:
        audit.observe(outcome)
    return audit


def test_efficiency_is_achieved_over_achievable():
    assert audit_of(OUTCOME, replace(OUTCOME, achieved_blocks=2)).efficiency == 0.5
    assert audit_of().efficiency == 1.0


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
    assert not audit_of(*[unforeseen] * 19).is_blind
    assert audit_of(*[unforeseen] * 20).is_blind
    assert audit_of(OUTCOME, *[unforeseen] * 20).is_blind


def test_an_expected_hit_ends_the_alarm_and_arms_it_again():
    unforeseen = RouteOutcome(replace(REPLY, predicted_blocks=0), achieved_blocks=5)
    expected = RouteOutcome(replace(REPLY, predicted_blocks=5), achieved_blocks=5)
    assert not audit_of(*[unforeseen] * 20, expected).is_blind
    assert not audit_of(*[unforeseen] * 20, expected, *[unforeseen] * 19).is_blind
    assert audit_of(*[unforeseen] * 20, expected, *[unforeseen] * 20).is_blind

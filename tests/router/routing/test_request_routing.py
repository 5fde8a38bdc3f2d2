"""Choices of an ingress and their outcomes, as its metrics show them."""

import logging
import math
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from protos.block_keys import PROBE_SALT, block_keys, probe_token_ids, root_key
from protos.messages import GenerateRequest, SpeculationExplanation, TokenChunk
from protos.served_model import ModelCard
from router.api_keys import Client, current_client
from router.routing.request_routing import RequestRouting, RouterMetrics
from router.routing.routed_call import Route, RoutedCall, RouteReply

PROBE = block_keys(probe_token_ids(16), 16, root_key("v1", PROBE_SALT))[-1]
CARD = ModelCard(300, 4096, (0,), "v1", 16, probe_key=PROBE)
REQUEST = GenerateRequest("r", tuple(range(200)))


class FakeIngress:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.routing = RequestRouting(RouterMetrics(self.registry))
        self.routing.learn(CARD)

    def serve(self, predicted: int, achievable: int, achieved: int, cost_s: float = 1.0, other_s: float = 9.0) -> None:
        call = self.routing.open(REQUEST)
        reply = RouteReply(predicted, achievable, cost_s, other_s, 0.5, ("a",), "", 77, 1)
        call.route = Route(0.002, reply)
        self.routing.accepted(call, TokenChunk("r", (1,), num_cached_tokens=16 * achieved))

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"outrider_router_{name}", labels)
        assert value is not None, name
        return value


@pytest.fixture
def ingress() -> FakeIngress:
    return FakeIngress()


def test_achieved_and_achievable_blocks_are_counted(ingress: FakeIngress):
    ingress.serve(5, 8, 5)
    ingress.serve(0, 4, 0)
    assert ingress.metric("hit_blocks_total") == 5
    assert ingress.metric("achievable_blocks_total") == 12
    assert ingress.metric("predicted_blocks_total") == 5
    assert ingress.metric("request_hit_blocks_count") == 2
    assert ingress.metric("decisions_total", basis="index") == 2
    assert ingress.metric("decision_seconds_count") == 2
    assert (ingress.metric("index_blocks"), ingress.metric("index_doubtful_pairs")) == (77, 1)


def test_stale_predictions_and_misroutes_are_counted_apart(ingress: FakeIngress):
    ingress.serve(4, 4, 2, cost_s=1.0, other_s=9.0)  # 1 s lost, still the cheapest
    ingress.serve(4, 4, 2, cost_s=1.0, other_s=1.5)
    assert (ingress.metric("stale_answers_total"), ingress.metric("misroutes_total")) == (2, 1)


def test_repeated_unforeseen_hits_raise_the_alarm(ingress: FakeIngress, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        for _ in range(25):
            ingress.serve(0, 0, 3)
    assert ingress.metric("blind") == 1
    assert len(caplog.records) == 1
    ingress.serve(3, 3, 3)
    assert ingress.metric("blind") == 0


def test_pairs_with_other_block_keys_raise_the_alarm_at_once(ingress: FakeIngress):
    ingress.routing.learn(ModelCard(300, 4096, (0,), "v2", 16, probe_key=PROBE))
    assert ingress.metric("blind") == 1
    assert ingress.routing.open(REQUEST).keys == b""


def test_choices_without_the_index_are_counted_by_their_reason_and_not_audited(ingress: FakeIngress):
    call = ingress.routing.open(REQUEST)
    call.route = Route(0.05, None, "timeout")
    ingress.routing.accepted(call, TokenChunk("r", (1,), num_cached_tokens=64))
    assert ingress.metric("decisions_total", basis="timeout") == 1
    assert ingress.metric("hit_blocks_total") == 0


def test_a_refused_request_gives_its_reservation_back(ingress: FakeIngress):
    withdrawn: list[RoutedCall] = []
    call = ingress.routing.open(REQUEST)
    reply = RouteReply(0, 0, 1.0, math.inf, 0.5, ("a",), "", 0, 0)
    call.route = Route(0.002, reply)
    call.withdraw = lambda: withdrawn.append(call)
    ingress.routing.refused(call)
    assert withdrawn == [call]
    assert ingress.metric("decisions_total", basis="ended") == 1


def test_every_choice_is_audited_or_counted_under_the_reason_why_not(ingress: FakeIngress):
    reply = RouteReply(1, 1, 1.0, math.inf, 0.5, ("a",), "", 0, 0)
    for number in range(3):
        ingress.serve(number, number, number)
    for route in (Route(0.002, reply), Route(0.05, None, "timeout"), Route(0.002, None, "diverted")):
        for end in (ingress.routing.refused, lambda call: ingress.routing.accepted(call, TokenChunk("r", (1,)))):
            call = ingress.routing.open(REQUEST)
            call.route = route
            end(call)
    counted = {
        each: ingress.metric("decisions_total", basis=each) for each in ("index", "timeout", "diverted", "ended")
    }
    assert counted == {"index": 4, "timeout": 1, "diverted": 1, "ended": 3}
    assert ingress.metric("request_hit_blocks_count") == counted["index"]
    assert ingress.metric("decision_seconds_count") == sum(counted.values())


def test_a_call_that_was_never_routed_counts_nowhere(ingress: FakeIngress):
    ingress.routing.refused(ingress.routing.open(REQUEST))
    assert ingress.metric("decision_seconds_count") == 0


def test_only_an_admin_is_told_why_a_pair_was_chosen(ingress: FakeIngress):
    explain = replace(REQUEST, speculation=replace(REQUEST.speculation, explain=True))
    end = [TokenChunk("r", (1,), explanation=SpeculationExplanation())]
    route = Route(0.002, RouteReply(1, 1, 1.0, 9.0, 0.5, ("a",), "prefix: a 1.0 s", 77, 1))
    told = []
    for client in (Client(), Client(is_admin=True)):
        token = current_client.set(client)
        call = ingress.routing.open(explain)
        current_client.reset(token)
        call.route = route
        told.append(ingress.routing.explained(call, end)[0].explanation.routes)
    assert told == [(), ("prefix: a 1.0 s",)]

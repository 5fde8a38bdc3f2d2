"""An ingress refuses by itself while the pairs are full, for moments, and per tenant."""

import pytest

from protos.errors import OverloadedError
from protos.messages import GenerateRequest
from router.backend.migration import RefusalGate


def request(tenant: str = "a", num_places: int = 1) -> GenerateRequest:
    return GenerateRequest("id", (1,), tenant=tenant, num_places=num_places)


def closed_gate(now_s: list[float], num_places: int = 1) -> RefusalGate:
    gate = RefusalGate(lambda: now_s[0])
    for _ in range(4):
        gate.check("a", num_places)
        gate.refused(request("a", num_places), OverloadedError("full", retry_after_s=3.0))
    return gate


def test_the_fourth_refusal_closes_for_a_moment():
    now_s = [0.0]
    gate = closed_gate(now_s)
    with pytest.raises(OverloadedError, match="full") as caught:
        gate.check("a", 1)
    assert caught.value.retry_after_s == 3.0
    now_s[0] = 0.06
    gate.check("a", 1)


def test_other_tenants_and_smaller_requests_may_try():
    gate = closed_gate([0.0], num_places=4)
    gate.check("b", 4)
    gate.check("a", 2)


def test_one_that_is_let_in_opens():
    gate = closed_gate([0.0])
    gate.accepted(request())
    gate.check("a", 1)


def test_refusals_far_apart_do_not_close():
    now_s = [0.0]
    gate = RefusalGate(lambda: now_s[0])
    for _ in range(9):
        gate.refused(request(), OverloadedError("full"))
        now_s[0] += 1.5
        gate.check("a", 1)
    gate.refused(request(), OverloadedError("full"))
    gate.check("a", 1)


def test_the_gate_is_never_closed_for_longer_than_a_fifth_of_a_second():
    now_s = [0.0]
    gate = closed_gate(now_s)
    for _ in range(50):
        gate.refused(request(), OverloadedError("full"))
    now_s[0] = 0.21
    gate.check("a", 1)


def test_after_the_pause_one_may_try_and_others_wait_for_its_answer():
    now_s = [0.0]
    gate = closed_gate(now_s)
    now_s[0] = 0.06
    gate.check("a", 1)
    with pytest.raises(OverloadedError):
        gate.check("a", 1)
    gate.accepted(request())
    gate.check("a", 1)
    with pytest.raises(OverloadedError):
        gate.check("a", 1)


def test_the_gate_opens_after_some_that_are_let_in_or_after_a_time():
    now_s = [0.0]
    gate = closed_gate(now_s)
    for _ in range(10):
        gate.accepted(request())
    for _ in range(9):
        gate.check("a", 1)
    gate = closed_gate(now_s)
    now_s[0] = 1.5
    for _ in range(9):
        gate.check("a", 1)

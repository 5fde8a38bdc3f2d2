"""The bound on requests in a pair: whole requests are admitted, or refused with a time to retry."""

import pytest

from actors.pair.pair_shell import PairAdmission
from protos.errors import OverloadedError
from protos.messages import GenerateRequest


def request(name: str = "a", index: int = 0, num_choices: int = 1) -> GenerateRequest:
    return GenerateRequest(f"{name}-{index}", (1,), num_places=num_choices if index == 0 else 1, is_admitted=index > 0)


def new_admission(max_requests: int, now_s: list[float] | None = None) -> PairAdmission:
    clock = [0.0] if now_s is None else now_s
    return PairAdmission(max_requests, lambda: clock[0], lambda: 0.0)


def test_a_place_is_free_again_after_leave():
    admission = new_admission(1)
    admission.enter(request())
    admission.leave(request(), 0.5)
    admission.enter(request())


def test_a_full_pair_refuses_with_a_retry_time():
    admission = new_admission(2)
    admission.enter(request())
    admission.enter(request())
    with pytest.raises(OverloadedError, match="2 requests are running or queued, and this pair takes 2") as caught:
        admission.enter(request())
    assert caught.value.retry_after_s == 1.0
    assert admission.num_refused == 1
    admission.leave(request(), 0.5)
    admission.enter(request())  # a refused request has taken no place


def test_the_retry_time_grows_with_the_duration_of_requests():
    admission = new_admission(1)
    for _ in range(100):
        admission.enter(request())
        admission.leave(request(), 20.0)
    admission.enter(request())
    with pytest.raises(OverloadedError) as caught:
        admission.enter(request())
    assert caught.value.retry_after_s == pytest.approx(20.0, abs=0.2)


def test_those_refused_together_are_not_told_the_same_time():
    admission = PairAdmission(1)
    admission.enter(request())
    times = set()
    for _ in range(20):
        with pytest.raises(OverloadedError) as caught:
            admission.enter(request())
        times.add(caught.value.retry_after_s)
    assert len(times) > 1
    assert all(1.0 <= time_s <= 1.25 for time_s in times)


def test_a_request_is_refused_whole_where_not_all_of_its_choices_have_a_place():
    admission = new_admission(4)
    admission.enter(request("a", num_choices=2))
    with pytest.raises(OverloadedError, match="this request has 3 choices"):
        admission.enter(request("b", num_choices=3))
    admission.enter(request("c", num_choices=2))
    for name in ("a", "c"):
        admission.enter(request(name, 1))
    with pytest.raises(OverloadedError):
        admission.enter(request("d"))


def test_places_of_choices_that_went_elsewhere_are_free_after_a_while():
    now_s = [0.0]
    admission = new_admission(4, now_s)
    admission.enter(request("a", num_choices=4))
    with pytest.raises(OverloadedError):
        admission.enter(request("b"))
    now_s[0] = 6.0
    for name in ("b", "c", "d"):
        admission.enter(request(name))
    with pytest.raises(OverloadedError):
        admission.enter(request("e"))


def test_what_was_admitted_is_never_refused_and_keeps_newcomers_out():
    admission = new_admission(1)
    admission.enter(request("a"))
    admission.enter(request("moved", 1))
    admission.leave(request(), 1.0)
    with pytest.raises(OverloadedError):
        admission.enter(request("b"))


def test_a_request_of_more_choices_than_places_is_let_into_an_empty_pair():
    admission = new_admission(2)
    admission.enter(request("a", num_choices=8))


def of_tenant(name: str, weight: float, num_choices: int = 1) -> GenerateRequest:
    return GenerateRequest(f"{name}-0", (1,), tenant=name, weight=weight, num_places=num_choices)


def test_tenants_are_let_in_by_weight_however_often_each_asks():
    now_s = [0.0]
    admission = new_admission(40, now_s)
    light, heavy = of_tenant("light", 1.0), of_tenant("heavy", 3.0)
    inside: list[GenerateRequest] = []
    num_admitted = {"light": 0, "heavy": 0}
    for turn in range(400):
        for each in (light, light, light, heavy):
            try:
                admission.enter(each)
            except OverloadedError:
                continue
            inside.append(each)
            num_admitted[each.tenant] += turn >= 200
        if len(inside) == 40:
            admission.leave(inside.pop(0), 1.0)
        now_s[0] += 0.01
    assert sum(each is heavy for each in inside) == 30
    assert num_admitted["heavy"] == pytest.approx(150, abs=5)
    assert sum(num_admitted.values()) == 200


def test_a_tenant_that_is_alone_or_asks_no_more_leaves_all_places_to_others():
    now_s = [0.0]
    admission = new_admission(4, now_s)
    light, heavy = of_tenant("light", 1.0), of_tenant("heavy", 3.0)
    for _ in range(4):
        admission.enter(light)
    with pytest.raises(OverloadedError):
        admission.enter(heavy)
    admission.leave(light, 1.0)
    with pytest.raises(OverloadedError):
        admission.enter(light)  # the place is kept for the other
    now_s[0] = 3.0
    admission.enter(light)


def test_no_place_stays_idle_for_a_request_that_is_larger_than_its_tenants_part():
    admission = new_admission(4)
    one, other = of_tenant("one", 1.0), of_tenant("other", 1.0, 3)
    admission.enter(one)
    admission.enter(one)
    with pytest.raises(OverloadedError):
        admission.enter(other)
    admission.enter(one)
    admission.enter(one)

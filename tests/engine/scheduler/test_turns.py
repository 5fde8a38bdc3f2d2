"""Turns: by weight between tenants, by arrival within one, and priorities that age."""

import random
from collections import Counter

from engine.scheduler.turns import PRIORITY_TOKENS, FairQueue
from protos.messages import GenerateRequest


def request(tenant: str = "", weight: float = 1.0, priority: int = 0) -> GenerateRequest:
    return GenerateRequest("r", (1,), tenant=tenant, weight=weight, priority=priority)


def served(queue: FairQueue, waiting: list[tuple[float, GenerateRequest]], num_requests: int) -> list[GenerateRequest]:
    order = []
    for _ in range(num_requests):
        turn, asked = waiting.pop(min(range(len(waiting)), key=lambda index: waiting[index][0]))
        queue.serve(asked, turn)
        order.append(asked)
    return order


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    queue, dice = FairQueue(), random.Random(0)
    turns = [queue.turn(request(), dice.randrange(1, 100)) for _ in range(20)]
    assert turns == sorted(turns)


def test_tokens_follow_the_weights_however_much_each_asks_for() -> None:
    queue = FairQueue()
    waiting = [(queue.turn(asked, 100), asked) for asked in [request("greedy")] * 300]
    waiting += [(queue.turn(asked, 100), asked) for asked in [request("heavy", weight=3.0)] * 100]
    counts = Counter(asked.tenant for asked in served(queue, waiting, 80))
    assert abs(counts["heavy"] - 60) <= 2


def test_a_tenant_that_was_idle_has_not_saved_turns_up() -> None:
    queue = FairQueue()
    waiting = [(queue.turn(asked, 100), asked) for asked in [request("busy")] * 100]
    served(queue, waiting, 50)
    waiting += [(queue.turn(asked, 100), asked) for asked in [request("late")] * 50]
    counts = Counter(asked.tenant for asked in served(queue, waiting, 40))
    assert abs(counts["late"] - counts["busy"]) <= 1


def test_a_lower_number_goes_first_and_a_higher_one_ages() -> None:
    queue = FairQueue()
    patient = queue.turn(request("a", priority=1), 10)
    assert queue.turn(request("b", priority=0), 10) < patient
    num_passed = 0
    while (turn := queue.turn(request("b", priority=0), 1000)) < patient:
        queue.serve(request("b", priority=0), turn)
        num_passed += 1
    assert num_passed <= PRIORITY_TOKENS / 1000 + 1

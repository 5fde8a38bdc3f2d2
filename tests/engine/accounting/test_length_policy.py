"""The policy on simulated pairs whose costs and acceptance are known, from its first pass on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

from engine.accounting import shape_choice
from engine.accounting.draft_cost import RequestedDrafts
from engine.accounting.draft_probes import DraftProbes
from engine.accounting.length_allocation import Allocation, allocate
from engine.accounting.length_policy import LengthPolicy
from engine.accounting.record import PassRecord
from engine.accounting.speculation_gate import ClassStep, SpeculationGate
from protos.messages import SamplingParams, SpeculationMethod
from tests.engine.fixtures.builders import make_sequence, pass_record, sequence_pass
from tests.engine.fixtures.pairs.simulated_pair import (
    MAX_DRAFTS,
    Costs,
    SimulatedPair,
    best_fixed,
    new_sequence,
    plain_speed,
    plan_pass,
)

ROOFLINE = Costs()
LINEAR = Costs(weights_s=0.004, row_s=0.001, fixed_s=0.002, draft_step_s=0.0006, draft_row_s=0.0001)
PROCESSOR = Costs(weights_s=0.050, row_s=0.0013, fixed_s=0.004, draft_step_s=0.002, draft_row_s=0.0001)
HEAVY_DRAFT = Costs(draft_step_s=0.003, draft_row_s=0.0001)
FAST = Costs(weights_s=0.002, row_s=0.00002, fixed_s=0.0001, draft_step_s=0.0001, draft_row_s=0.0)
SHORT = Costs(weights_s=0.0, row_s=0.00009, fixed_s=0.0006, draft_step_s=0.00016, draft_row_s=0.000003)
DEAR = Costs(draft_step_s=0.02)
STREAMS = [1, 2, 4, 8, 16, 32, 64]


def new_policy() -> LengthPolicy:
    return LengthPolicy(4, MAX_DRAFTS)


@pytest.mark.parametrize("num_streams", STREAMS)
@pytest.mark.parametrize("costs", [ROOFLINE, LINEAR, HEAVY_DRAFT])
def test_a_bad_draft_costs_at_most_two_percent_of_plain_decoding(costs: Costs, num_streams: int) -> None:
    pairs = [SimulatedPair(lambda index, step: 0.2, costs, rng=np.random.default_rng(seed)) for seed in range(3)]
    speeds = [pair.run(num_streams, 600, new_policy()) for pair in pairs]
    assert np.mean(speeds) >= 0.98 * plain_speed(num_streams, costs)


@pytest.mark.parametrize("num_streams", STREAMS)
@pytest.mark.parametrize("costs", [ROOFLINE, LINEAR, HEAVY_DRAFT])
def test_with_a_good_draft_no_fixed_length_is_five_percent_better(costs: Costs, num_streams: int) -> None:
    speeds = []
    for seed in range(4):
        pair = SimulatedPair(lambda index, step: 0.8, costs, rng=np.random.default_rng(seed))
        pair.run(num_streams, 150, policy := new_policy())
        speeds.append(pair.run(num_streams, 300, policy))
    assert np.mean(speeds) >= 0.95 * best_fixed(num_streams, 0.8, costs)[1]


@pytest.mark.parametrize("num_streams", [1, 2, 8, 32])
def test_where_requests_come_and_go_no_fixed_length_is_five_percent_better(num_streams: int) -> None:
    def pair() -> SimulatedPair:
        return SimulatedPair(lambda index, step: 0.72, PROCESSOR, request_tokens=32, prompt_tokens=96)

    best = max(pair().run(num_streams, 400, length) for length in (0, 1, 2, 4, 6, 8))
    adaptive, policy = pair(), new_policy()
    adaptive.run(num_streams, 150, policy)
    assert adaptive.run(num_streams, 350, policy) >= 0.95 * best


def test_clients_wait_for_six_plain_passes_at_most() -> None:
    """Fourteen drafts have the best goodput here: their pass takes 80 ms, a plain pass 10 ms."""
    costs = Costs(weights_s=0.0099, row_s=0.0, fixed_s=0.0001, draft_step_s=0.005, draft_row_s=0.0)
    pair = SimulatedPair(lambda index, step: 1.0, costs, noise=0.0, request_tokens=10**6)
    pair.run(1, 600, new_policy())
    assert 6 <= max(pair.lengths[-100:]) <= 10


class _Stepped(Costs):
    """A kernel for few rows is cheap, and any draft needs the other one: only long drafts pay."""

    def target_s(self, num_rows: int) -> float:
        return 0.016 if num_rows <= 8 else 0.021 + 0.0003 * num_rows


@pytest.mark.parametrize("num_without", [0, 1])
def test_a_shared_pass_is_long_only_for_tokens_that_all_get(num_without: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts each make a pass of 2.6 plain ones, for 2.9 tokens each; one draft each would not pay."""
    costs = _Stepped(draft_step_s=0.007, draft_row_s=0.0)
    pair = SimulatedPair(lambda index, step: 0.98, costs, noise=0.02, request_tokens=10**6)
    monkeypatch.setattr(
        pair, "_new_sequence", lambda index: new_sequence(index, 0 if index < num_without else MAX_DRAFTS)
    )
    policy = new_policy()
    pair.run(8, 300, policy)
    passes = [costs.target_s(8 + number) + costs.draft_s([ceil(number / 8)]) for number in pair.lengths[200:]]
    longest = float(np.median(passes)) / costs.target_s(8)
    limit = 1.1 * shape_choice.LONGEST_PER_TOKEN  # costs are measured
    if num_without:
        assert longest <= limit
    else:
        assert limit < longest <= 4.4
        assert pair.run(8, 200, policy) > 1.1 * plain_speed(8, costs)


def test_sequences_without_drafts_are_planned_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, plans = SimulatedPair(lambda index, step: 0.0, HEAVY_DRAFT, request_tokens=10**6), []

    def noted(*arguments: Any) -> Allocation:
        plans.append(len(pair.lengths))
        return allocate(*arguments)

    monkeypatch.setattr(shape_choice, "allocate", noted)
    pair.run(1, 500, new_policy())
    resting = [step for step in plans if step >= 100]
    assert 400 / 18 <= len(resting) <= 400 / 16 + 8  # without probes


def test_a_first_draft_that_reads_the_prompt_is_no_price_of_drafts() -> None:
    policy = new_policy()
    for index in range(30):  # every request has two passes; the first waits for the draft to prefill
        sequence = new_sequence(index)
        for draft_s in (0.500, 0.004):
            policy.on_pass(pass_record([sequence_pass(sequence, 4, 4, 3)], draft_s, 0.010))
            plan_pass(policy, [sequence])
    assert policy._costs.drafts.seconds({"model": RequestedDrafts(4, 4)}) == pytest.approx(0.004, rel=0.05)


def test_no_drafts_are_asked_for_where_they_lose_but_probes() -> None:
    pair, policy = SimulatedPair(lambda index, step: 0.2, HEAVY_DRAFT), new_policy()
    assert not policy.is_resting
    pair.run(8, 400, policy)
    assert policy.is_resting
    late = pair.lengths[100:]
    assert sum(length > 0 for length in late) <= len(late) / 50 + 3
    assert sum(late) < 0.02 * 8 * len(late)


@pytest.mark.parametrize(("planning_s", "is_worth"), [(0.0, True), (0.004, False)])
def test_drafts_have_to_gain_the_time_of_their_plans(planning_s: float, is_worth: bool) -> None:
    """A pass takes 10 ms, and a draft gains 30%."""

    class Planning(LengthPolicy):
        def on_pass(self, record: PassRecord) -> None:
            self.charge(planning_s)
            super().on_pass(record)

    pair = SimulatedPair(lambda index, step: 0.3, ROOFLINE, noise=0.0, request_tokens=10_000)
    pair.run(1, 800, Planning(4, MAX_DRAFTS))
    share = sum(length > 0 for length in pair.lengths[300:]) / 500
    assert share > 0.9 if is_worth else share < 0.5


def test_another_draft_is_not_judged_by_the_one_before() -> None:
    policy = new_policy()
    SimulatedPair(lambda index, step: 0.1, HEAVY_DRAFT).run(8, 600, policy)
    policy.forget_draft()
    pair = SimulatedPair(lambda index, step: 0.9, HEAVY_DRAFT)
    pair.run(8, 30, policy)
    assert np.mean(pair.lengths[-20:]) > 8 * 2


def test_a_draft_that_has_become_good_is_found_out() -> None:
    pair = SimulatedPair(lambda index, step: 0.1 if step < 200 else 0.9, ROOFLINE, request_tokens=10**9)
    pair.run(4, 1500, new_policy())
    assert np.mean(pair.lengths[-100:]) > 4 * 4


def test_a_probe_is_charged_for_what_the_draft_had_to_catch_up_with() -> None:
    pair, policy = SimulatedPair(lambda index, step: 0.0, Costs(draft_step_s=0.02)), new_policy()
    pair.run(1, 200, policy)
    num_before = len(pair.lengths)
    pair.run(1, 1000, policy)
    assert 1 <= sum(length > 0 for length in pair.lengths[num_before:]) <= 6


def test_a_probe_of_a_request_that_has_ended_goes_on_with_another() -> None:
    probes, planned = DraftProbes(4), [0, 0]
    probes.probe(100, {"first": 1, "second": 2}, planned, [8, 8])
    assert planned == [1, 0]
    for step, expected in ((101, 1), (102, 4), (103, 0)):  # "first" has ended
        probes.probe(step, {"second": 2}, planned := [0], [8])
        assert planned == [expected]


@pytest.mark.parametrize("num_streams", [1, 4])
def test_drafts_come_back_when_a_draft_that_was_slow_for_a_while_is_not(num_streams: int) -> None:
    costs = Costs(weights_s=0.005, row_s=0.0002, draft_step_s=0.0008, missed_token_s=0.0002)
    pair, policy = SimulatedPair(lambda index, step: 0.8, costs, request_tokens=128, prompt_tokens=12), new_policy()
    pair.costs = replace(costs, draft_step_s=0.040)
    pair.run(num_streams, 300, policy)
    assert sum(pair.lengths[-100:]) < 10
    pair.costs = costs
    pair.run(num_streams, 1500, policy)
    assert np.mean(pair.lengths[-100:]) > 1.5 * num_streams


@pytest.mark.parametrize(("num_sequences", "is_planned"), [(3, True), (4, False), (5, False), (16, False), (17, True)])
def test_a_batch_half_or_twice_as_large_keeps_its_plan(num_sequences: int, is_planned: bool) -> None:
    policy, pair = new_policy(), SimulatedPair(lambda index, step: 1.0, FAST, noise=0.0, request_tokens=10**9)
    pair.run(8, 300, policy)
    slots = [new_sequence(index) for index in range(1000, 1008)]
    while policy._next_plan - policy._step < 3:  # the last plan holds
        plan_pass(policy, slots)
        pair._pass(slots, 0, policy)
    with patch.object(policy, "_plan", wraps=policy._plan) as plan:
        plan_pass(policy, [*slots, *[new_sequence(index) for index in range(2000, 2010)]][:num_sequences])
    assert plan.called is is_planned


def test_a_request_that_joins_between_two_plans_keeps_its_own_limits() -> None:
    policy, pair = new_policy(), SimulatedPair(lambda index, step: 1.0, FAST, noise=0.0, request_tokens=10**9)
    first, found = [new_sequence(index) for index in range(4)], set()
    for step in range(200):
        plan_pass(policy, first)
        pair._pass(first, step, policy)
        if step >= 100:
            joined = [
                new_sequence(2 + 3 * step),
                new_sequence(3 + 3 * step, num_drafts=0),
                new_sequence(4 + 3 * step, 2),
            ]
            plan_pass(policy, [first[0], *joined])
            found.add(tuple(each.draft_allowance for each in joined))
            plan_pass(policy, first)
    assert max(length for length, _, _ in found) > 4
    assert {(none, short) for _, none, short in found} <= {(0, 0), (0, 1), (0, 2)}


@pytest.mark.parametrize(("num_streams", "request_tokens", "plan_each"), [(32, 128, 15), (1, 4, 4)])
def test_new_requests_of_a_batch_that_rests_need_a_plan_when_they_are_as_many_as_it(
    num_streams: int, request_tokens: int, plan_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fourth pass has a new request in both cases, and a rest has up to 17 passes."""
    pair = SimulatedPair(lambda index, step: 0.0, HEAVY_DRAFT, request_tokens=request_tokens)
    policy = new_policy()
    pair.run(num_streams, 200, policy)
    monkeypatch.setattr(policy, "_plan", plan := Mock(wraps=policy._plan))
    pair.run(num_streams, 400, policy)
    assert plan.call_count == pytest.approx(400 / plan_each, rel=0.2)


def test_bad_luck_in_the_first_passes_ends_no_drafts_for_long() -> None:
    """Of 16 runs that begin with two rejected drafts of a good model, none still rests after 600 passes."""
    costs = Costs(weights_s=0.002, row_s=0.00045, fixed_s=0.0004, draft_step_s=0.0012, draft_row_s=0.0001)
    num_drafted = []
    for seed in range(16):
        pair = SimulatedPair(lambda index, step: 0.9, costs, request_tokens=128, rng=np.random.default_rng(seed))
        pair.run(1, 600, new_policy())
        num_drafted.append(sum(length > 0 for length in pair.lengths[-100:]))
    assert min(num_drafted) > 50


def test_rests_become_longer_until_plans_take_little_of_the_time() -> None:
    """A plan takes 4 ms here: as long as 40 passes give it half a percent of."""
    pair, policy, steps = SimulatedPair(lambda index, step: 0.0, DEAR, request_tokens=10**9), new_policy(), list[int]()
    slots = [new_sequence(0)]
    for step in range(1000):
        has_planned = policy._has_planned
        policy.charge(0.004)
        if has_planned:
            steps.append(step)
        plan_pass(policy, slots)
        pair._pass(slots, step, policy)
    rests = [later - earlier for earlier, later in pairwise(steps)]
    assert max(rests[:5]) <= 16
    assert max(rests) > 64


@pytest.mark.parametrize("num_left", [1, 2, 4])
@pytest.mark.parametrize("num_passes", range(1, 12))
def test_the_last_tokens_of_a_request_take_no_drafts_from_the_next_one(num_passes: int, num_left: int) -> None:
    pair, policy = SimulatedPair(lambda index, step: 0.9, FAST, noise=0.0, request_tokens=10**9), new_policy()
    pair.run(1, 200, policy)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_left)
    slots = [make_sequence("last", (1,), sampling, num_drafts=MAX_DRAFTS, method=SpeculationMethod.MODEL)]
    for step in range(num_passes):
        plan_pass(policy, slots)
        pair._pass(slots, step, policy)
    slots = [new_sequence(1000)]
    slots[0].draft_allowance = 0  # its first pass reads the prompt
    pair._pass(slots, 0, policy)
    plan_pass(policy, slots)
    assert slots[0].draft_allowance > 4


def test_plans_hold_where_many_lengths_are_worth_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of half a millisecond is 0.3% of 64 passes; one pass in 64 is plain."""
    costs = Costs(weights_s=0.0, row_s=0.00008, fixed_s=0.002, draft_step_s=0.0002, draft_row_s=0.0)
    pair, policy = (
        SimulatedPair(lambda index, step: 0.95, costs, 0.2, request_tokens=128, prompt_tokens=30),
        new_policy(),
    )
    pair.run(8, 200, policy)
    monkeypatch.setattr(policy, "_plan", plan := Mock(wraps=policy._plan))
    pair.run(8, 300, policy)
    assert 300 / 64 <= plan.call_count <= 25


def test_a_plan_learns_from_all_passes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SimulatedPair(lambda index, step: 0.8, FAST, request_tokens=10**9)
    policy = new_policy()
    monkeypatch.setattr(policy, "_learn", learn := Mock(wraps=policy._learn))
    pair.run(4, 300, policy)
    learned = [noted.step for (noted, _), _ in learn.call_args_list]
    assert learned == [*range(1, len(learned) + 1)]
    assert len(learned) > 300 - 64


def test_the_times_of_a_few_passes_and_of_all_plain_ones_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SimulatedPair(lambda index, step: 0.8, FAST, request_tokens=10**9)
    policy = new_policy()
    pair.run(4, 300, policy)
    monkeypatch.setattr(policy, "_learn_time", learn := Mock(wraps=policy._learn_time))
    pair.run(4, 640, policy)
    plain = sum(length == 0 for length in pair.lengths[300:])
    records, numbers = zip(*[(record, number) for (_, record, _, _, number), _ in learn.call_args_list], strict=True)
    assert sum(not any(each.num_requested for each in record.passes) for record in records) >= plain - 1 >= 5
    assert len(records) <= 640 / 4
    assert sum(numbers) == pytest.approx(640, abs=100), "each of them represents all passes of its plan"


def test_a_plan_that_holds_is_the_plan_whatever_else_set_the_lengths() -> None:
    """Reasoning steps set the length of their pass themselves."""
    policy, pair = new_policy(), SimulatedPair(lambda index, step: 1.0, FAST, noise=0.0, request_tokens=10**9)
    slots, lengths = [new_sequence(0, num_drafts=4)], []
    for step in range(200):
        plan_pass(policy, slots)
        lengths.append(slots[0].draft_allowance)
        pair._pass(slots, step, policy)
        slots[0].draft_allowance = 60
    assert max(lengths) == 4


def test_a_replaced_draft_is_planned_for_at_once() -> None:
    policy = new_policy()
    SimulatedPair(lambda index, step: 0.1, HEAVY_DRAFT).run(8, 600, policy)
    policy.forget_draft()
    pair = SimulatedPair(lambda index, step: 0.9, ROOFLINE)
    pair.run(8, 3, policy)
    assert sum(pair.lengths) > 0


def test_passes_between_two_plans_without_drafts_are_not_learned_from_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, policy = SimulatedPair(lambda index, step: 0.0, HEAVY_DRAFT, request_tokens=10**6), new_policy()
    pair.run(1, 200, policy)
    learned = []
    monkeypatch.setattr(policy._costs, "observe", lambda *sizes: learned.append(sizes))
    before = policy._gates._gates["model-greedy"].meter._passes
    pair.run(1, 400, policy)
    assert len(learned) < 400 / 6
    assert policy._gates._gates["model-greedy"].meter._passes > before  # each represents all before it


def test_passes_of_uneven_times_end_no_drafts_that_pay() -> None:
    """Few plain passes are known while drafts go on: a plain pass that may be cheaper is no reason to stop."""

    def pair(seed: int) -> SimulatedPair:
        rng = np.random.default_rng(seed)
        return SimulatedPair(lambda index, step: 0.85, SHORT, 0.4, request_tokens=128, prompt_tokens=60, rng=rng)

    best, shares = max(pair(0).run(1, 1000, length) for length in (2, 3, 4)), []
    for seed in range(16):
        pair(seed).run(1, 200, policy := new_policy())
        shares.append(pair(seed + 100).run(1, 400, policy) / best)
    assert min(shares) > 0.9


def test_a_pass_with_a_prompt_is_no_plain_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has fewer passes than there are between two plain ones, and its first pass reads a prompt."""
    pair = SimulatedPair(lambda index, step: 0.8, FAST, request_tokens=128, prompt_tokens=60)
    pair.run(1, 200, policy := new_policy())
    monkeypatch.setattr(policy._costs, "observe", observe := Mock(wraps=policy._costs.observe))
    pair.run(1, 640, policy)
    num_plain = sum(sizes.args[:2] == (0, 1) for sizes in observe.call_args_list)
    assert num_plain == pytest.approx(640 / 64, abs=2)


def test_prompts_are_as_frequent_in_the_costs_of_a_batch_that_rests_as_in_all_passes() -> None:
    """A prompt hides a part of the drafts' time: too many of them would make drafts look cheap."""
    pair = SimulatedPair(lambda index, step: 0.0, HEAVY_DRAFT, request_tokens=128, prompt_tokens=60)
    policy, shares = new_policy(), []
    for _ in range(20):
        pair.run(8, 100, policy)
        shares.append(policy._costs.row_seconds(8, 1, is_optimistic=False).prompt_share)
    assert np.mean(shares[1:]) == pytest.approx(8 / 128, abs=0.04)


def test_more_load_means_shorter_drafts_and_less_load_longer_ones() -> None:
    means = []
    for seed in range(3):
        pair, policy = SimulatedPair(lambda index, step: 0.8, ROOFLINE, rng=np.random.default_rng(seed)), new_policy()
        for num_streams in (1, 64, 1):
            pair.run(num_streams, 120, policy)
            means.append(np.mean(pair.lengths[-50:]) / num_streams)
    assert np.median(means[1::3]) < 0.2
    assert min(*means[0::3], *means[2::3]) > 5


def test_drafts_go_to_those_whose_drafts_stand() -> None:
    pair = SimulatedPair(lambda index, step: 0.9 if index % 2 else 0.1, ROOFLINE, request_tokens=10**9)
    policy = new_policy()
    slots = [new_sequence(index) for index in range(16)]
    plan_pass(policy, slots)
    lengths = []
    for step in range(150):
        pair._pass(slots, step, policy)
        plan_pass(policy, slots)
        lengths.append([each.draft_allowance for each in slots])
    usual = np.median(lengths[-20:], axis=0)  # those without drafts are tried again now and then
    assert min(usual[1::2]) > max(usual[::2])


def test_a_request_never_gets_more_than_it_may_have() -> None:
    policy = new_policy()
    short, none = new_sequence(0, num_drafts=2), new_sequence(1, num_drafts=0)
    for _ in range(20):
        plan_pass(policy, [short, none])
        assert short.draft_allowance <= 2
        assert none.draft_allowance == 0
        length = short.draft_allowance
        passes = [sequence_pass(short, length, length, length), sequence_pass(none, 0, 0, 0)]
        policy.on_pass(pass_record(passes, 0.0, 0.01))
    assert length == 2


def test_a_fixed_length_stays_and_leaves_drafts_to_the_others() -> None:
    policy, pair = new_policy(), SimulatedPair(lambda index, step: 0.9, ROOFLINE, request_tokens=10**9)
    slots = [new_sequence(0), new_sequence(1, num_drafts=3)]
    slots[1].has_fixed_length = True
    lengths = []
    for step in range(300):
        plan_pass(policy, slots)
        assert slots[1].draft_allowance == 3
        lengths.append(slots[0].draft_allowance)
        pair._pass(slots, step, policy)
    assert lengths[-50:].count(0) <= 2
    assert max(lengths[-50:]) > 4


@pytest.mark.parametrize(("acceptance", "num_streams"), [(0.8, 4), (0.5, 16), (0.2, 8)])
def test_the_measured_speedup_is_the_true_one(acceptance: float, num_streams: int) -> None:
    pair, policy = SimulatedPair(lambda index, step: acceptance, ROOFLINE), new_policy()
    pair.run(num_streams, 300, policy)
    true = pair.run(num_streams, 700, policy) / plain_speed(num_streams, ROOFLINE)
    assert policy.speedups == {"model-greedy": pytest.approx(true, rel=0.06)}


def test_a_class_is_a_method_and_greedy_or_not() -> None:
    assert new_sequence(0).draft_class == "model-greedy"
    assert new_sequence(0, temperature=0.7).draft_class == "model-sampled"


@pytest.mark.parametrize("catch_up_s", [0.0, 1.0])
@pytest.mark.parametrize("seconds", [1.05, 1.2, 2.0])
def test_a_class_that_gains_nothing_loses_a_hundredth_of_the_time_in_trials(seconds: float, catch_up_s: float) -> None:
    gate, num_trial_steps, extra_s = SpeculationGate("model-greedy"), 0, 0.0
    for _ in range(40_000):
        is_open = gate.is_open(8)
        is_first = is_open and num_trial_steps % 16 == 0
        step = ClassStep(8, 8, seconds if is_open else 1.0, 1.0, catch_up_s=catch_up_s * is_first)
        num_trial_steps += is_open
        extra_s += step.seconds + step.catch_up_s - 1.0
        gate.observe(step, 8, is_drafting=is_open)
    assert num_trial_steps >= 32
    assert extra_s <= 0.015 * 40_000


def test_the_gate_does_not_miss_the_few_texts_that_repeat() -> None:
    """One request in eight gains threefold, and the others lose 2%."""
    gate, num_tokens, seconds = SpeculationGate("suffix-greedy"), 0, 0.0
    for request in range(160):
        left, (gain, cost_s) = 128, (3, 1.1) if request % 8 == 7 else (1, 1.02)
        while left > 0:
            is_open = gate.is_open(1)
            step = ClassStep(1, gain, cost_s, 1.0) if is_open else ClassStep(1, 1, 1.0, 1.0)
            gate.observe(step, 1, is_drafting=is_open)
            left, num_tokens, seconds = left - step.num_tokens, num_tokens + step.num_tokens, seconds + step.seconds
    always_open = 8 / (7 * 1.02 + 1.1 / 3)
    assert num_tokens / seconds >= 0.98 * always_open


def test_the_gate_stays_open_for_a_class_that_gains() -> None:
    gate = SpeculationGate("model-greedy")
    for _ in range(500):
        gate.observe(ClassStep(8, 20, 1.2, 1.0), 8, is_drafting=True)
        assert gate.is_open(8)
    assert gate.meter.speedup == pytest.approx(20 / 8 / 1.2)


def test_a_gate_that_is_closed_to_a_full_batch_is_open_to_one_sequence() -> None:
    gate = SpeculationGate("suffix-greedy")
    for _ in range(20):
        gate.observe(ClassStep(16, 20, 1.3, 1.0), 16, is_drafting=True)
    assert [gate.is_open(size) for size in (1, 8, 11, 12, 16, 22, 23)] == [True, True, True, False, False, False, True]


def test_a_class_that_rests_keeps_its_gate_open() -> None:
    """Its passes gain nothing because they have no drafts."""
    gate = SpeculationGate("model-greedy")
    for _ in range(500):
        gate.observe(ClassStep(8, 8, 1.0, 1.0), 8, is_drafting=False)
    assert gate.is_open(8)

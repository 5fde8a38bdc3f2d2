"""The choice between draft models with known costs and acceptance, for parallel streams on a simulated clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from engine.accounting.draft_cost import DraftCosts, RequestedDrafts
from engine.accounting.length_policy import LengthPolicy
from engine.accounting.request_limits import EXPLORED, MethodChooser
from engine.sequence.sequence import Sequence
from protos.messages import SamplingParams
from tests.engine.fixtures.builders import make_sequence, pass_record, sequence_pass
from tests.engine.fixtures.pairs.simulated_pair import plan_pass

MAX_DRAFTS = 8
PASS_S = 0.010
REQUEST_TOKENS = 60


@dataclass(frozen=True)
class SimulatedDraftModel:
    """A draft model: its acceptance, and its seconds per drafted token."""

    acceptance: float
    step_s: float


def served(drafters: dict[str, SimulatedDraftModel], num_streams: int, num_requests: int) -> list[str]:
    """Return the methods of successive requests on each stream; the models draft in parallel."""
    rng, policy, chosen = np.random.default_rng(0), LengthPolicy(4, MAX_DRAFTS), list[str]()
    chooser = MethodChooser(tuple(drafters), policy.goodput)

    def next_sequence() -> Sequence:
        chosen.append(chooser.choose("greedy"))
        sampling = SamplingParams(temperature=0.0, max_tokens=10**6)
        return make_sequence(f"r{len(chosen)}", (1,), sampling, num_drafts=MAX_DRAFTS, method=chosen[-1])

    slots, left = [next_sequence() for _ in range(num_streams)], [REQUEST_TOKENS] * num_streams
    plan_pass(policy, slots)
    while len(chosen) < num_requests:
        passes, waits = [], [0.0]
        for slot, sequence in enumerate(slots):
            length, drafter = sequence.draft_allowance, drafters[str(sequence.method)]
            num_accepted = int(np.cumprod(rng.random(length) < drafter.acceptance).sum())
            passes.append(sequence_pass(sequence, length, length, num_accepted))
            waits.append(drafter.step_s * length)
            left[slot] -= num_accepted + 1
        policy.on_pass(pass_record(passes, max(waits) * rng.lognormal(0.0, 0.05), PASS_S * rng.lognormal(0.0, 0.05)))
        for slot in range(num_streams):
            if left[slot] <= 0:
                slots[slot], left[slot] = next_sequence(), REQUEST_TOKENS
        plan_pass(policy, slots)
    return chosen


@pytest.mark.parametrize("num_streams", [1, 4, 16])
@pytest.mark.parametrize(
    ("drafters", "best"),
    [
        ({"model": SimulatedDraftModel(0.8, 0.0005), "prose": SimulatedDraftModel(0.5, 0.0005)}, "model"),
        ({"model": SimulatedDraftModel(0.5, 0.0005), "prose": SimulatedDraftModel(0.8, 0.0005)}, "prose"),
        (
            {"model": SimulatedDraftModel(0.9, 0.0080), "prose": SimulatedDraftModel(0.7, 0.0005)},
            "prose",
        ),  # the better one is too slow
    ],
)
def test_most_requests_get_the_draft_that_is_worth_most(
    drafters: dict[str, SimulatedDraftModel], best: str, num_streams: int
) -> None:
    chosen = Counter(served(drafters, num_streams, 10 * EXPLORED)[4 * EXPLORED :])
    assert chosen[best] >= 0.85 * chosen.total()
    assert chosen.total() - chosen[best] >= 5, "the other one is tried now and then"


def test_a_wait_for_two_methods_is_divided_by_what_each_costs_alone() -> None:
    costs, both = DraftCosts(), {"slow": RequestedDrafts(4, 4), "fast": RequestedDrafts(4, 4)}
    assert costs.shares(both) == {"slow": 0.5, "fast": 0.5}, "by tokens, while nothing is known"
    for _ in range(20):
        costs.observe({"slow": RequestedDrafts(4, 4)}, 0.030)
        costs.observe({"fast": RequestedDrafts(4, 4)}, 0.010)
    assert costs.shares(both) == pytest.approx({"slow": 0.75, "fast": 0.25}, rel=0.01)
    for _ in range(20):
        costs.observe(both, 0.040)
    assert costs.seconds({"slow": RequestedDrafts(4, 4)}) == pytest.approx(0.030, rel=0.02)

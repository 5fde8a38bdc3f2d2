"""Chains or trees on simulated pairs: the policy has the shape that pays, at every number of streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from engine.accounting import shape_choice
from engine.accounting.length_policy import LengthPolicy
from engine.accounting.record import SequencePass
from engine.batch.draft import Draft
from engine.sequence.batch import CheckedDraft, ScheduledSequence
from engine.verifier.verify_task import VerifyResult
from tests.engine.fixtures.builders import pass_record
from tests.engine.fixtures.pairs.simulated_pair import (
    MAX_DRAFTS,
    Costs,
    SimulatedPair,
    best_fixed,
    new_sequence,
    plain_speed,
)

NODES = 8
FLAT = (0.62, 0.46, 0.36, 0.28, 0.22, 0.18, 0.15, 0.13)  # alternatives are worth much: trees pay
STEEP = (0.55, 0.42, 0.3, 0.2, 0.15, 0.1, 0.08, 0.06)  # worse than the chains of the same draft
WRONG = (0.02,) * NODES
COSTS = Costs(weights_s=0.010, row_s=0.0006, fixed_s=0.0005, draft_step_s=0.0006, draft_row_s=0.00002)


@dataclass(frozen=True, slots=True)
class World:
    """The chance of a chain's drafts, and of a tree's nodes."""

    chain: float
    nodes: tuple[float, ...]

    def pair(self, costs: Costs = COSTS) -> SimulatedPair:
        return SimulatedPair(lambda index, step: self.chain, costs, nodes=self.nodes)

    def best(self, num_streams: int, costs: Costs = COSTS) -> float:
        """The tokens per second of the best fixed shape."""
        trees = [
            num_streams
            * (1 + sum(self.nodes[:size]))
            / (costs.target_s(num_streams * (size + 1)) + costs.draft_s([size] * num_streams, 0, size.bit_length()))
            for size in range(2, NODES + 1)
        ]
        return max(*trees, best_fixed(num_streams, self.chain, costs)[1], plain_speed(num_streams, costs))


TREES, CHAINS, NOTHING = World(0.55, FLAT), World(0.8, STEEP), World(0.02, WRONG)


def new_policy() -> LengthPolicy:
    return LengthPolicy(4, MAX_DRAFTS, max_nodes=NODES)


@pytest.mark.parametrize("num_streams", [1, 8, 32])
@pytest.mark.parametrize(("world", "has_trees"), [(TREES, True), (CHAINS, False)])
def test_no_fixed_shape_is_five_percent_better(world: World, has_trees: bool, num_streams: int) -> None:
    speeds, shares = [], []
    for seed in range(12 if num_streams == 1 else 4):
        pair, policy = world.pair(), new_policy()
        pair.rng = np.random.default_rng(seed)
        pair.run(num_streams, 100, policy)
        num_before = len(pair.num_trees)
        speeds.append(pair.run(num_streams, 300, policy))
        shares.append(np.mean(pair.num_trees[num_before:]) / num_streams)
    assert np.mean(speeds) >= 0.95 * world.best(num_streams)
    if num_streams == 1:
        assert np.mean(shares) > 0.8 if has_trees else np.mean(shares) < 0.15


def test_luck_in_the_first_passes_of_a_shape_does_not_last() -> None:
    """A class that begins with trees, and whose first chains are unlucky, has chains after 200 passes."""
    shares = []
    for seed in range(8):
        pair, policy = CHAINS.pair(), new_policy()
        pair.rng = np.random.default_rng(seed)
        pair.run(1, 200, policy)
        num_before = len(pair.num_trees)
        pair.run(1, 100, policy)
        shares.append(np.mean(pair.num_trees[num_before:]))
    assert np.mean(shares) < 0.15


@pytest.mark.parametrize("num_streams", [1, 8, 32])
def test_a_draft_that_is_wrong_on_purpose_costs_two_percent_at_most(num_streams: int) -> None:
    assert NOTHING.pair().run(num_streams, 500, new_policy()) >= 0.98 * plain_speed(num_streams, COSTS)


def test_a_tree_of_one_node_is_judged_by_the_chains_that_it_becomes() -> None:
    """Luck with the first trees would last for ever: such a draft is never a tree again."""
    speeds = []
    for seed in range(6):
        pair = NOTHING.pair()
        pair.rng = np.random.default_rng(seed)
        speeds.append(pair.run(1, 500, new_policy()))
    assert np.mean(speeds) >= 0.9875 * plain_speed(1, COSTS)


@pytest.mark.parametrize("world", [TREES, CHAINS])
def test_two_seconds_after_a_change_of_load_the_shape_fits(world: World) -> None:
    """One stream, 32, and one again, with two seconds of passes before each measurement."""
    speeds = []
    for seed in range(7):
        pair, policy = world.pair(), new_policy()
        pair.rng = np.random.default_rng(seed)
        for num_streams in (1, 32, 1, 32):
            pass_s = COSTS.target_s(num_streams) * shape_choice.LONGEST_PER_TOKEN
            pair.run(num_streams, int(2.0 / pass_s), policy)
            speeds.append(pair.run(num_streams, 100, policy) / world.best(num_streams))
    assert np.median(np.reshape(speeds, (7, 4)), axis=0).min() >= 0.93  # of each phase


def test_the_other_shape_is_measured_in_one_draft_of_64_with_as_many_rows() -> None:
    numbers = []
    for seed in range(7):
        pair, policy = CHAINS.pair(), new_policy()
        pair.rng = np.random.default_rng(seed)
        pair.run(1, 200, policy)
        pair.num_trees.clear()
        pair.lengths.clear()
        pair.run(1, 640, policy)
        explored = [length for length, is_tree in zip(pair.lengths, pair.num_trees, strict=True) if is_tree]
        assert max(explored) <= max(pair.lengths)
        numbers.append(len(explored))
    assert 5 <= np.median(numbers) <= 2 * 640 / 64  # more while its class is in doubt


def test_a_draft_whose_trees_have_become_better_is_found_out() -> None:
    pair, policy = CHAINS.pair(), new_policy()
    pair.run(1, 200, policy)
    pair.nodes = (0.95,) * NODES
    pair.run(1, 1200, policy)
    assert np.mean(pair.num_trees[-100:]) > 0.8


def test_chains_that_come_where_trees_were_requested_are_evidence_about_trees() -> None:
    policy, sequence, trees = new_policy(), new_sequence(0), []
    sequence.num_tree_nodes = NODES
    for _ in range(120):
        (size,) = policy.sizes([sequence])
        draft = CheckedDraft(Draft((0,) * size.num_tokens), size.num_tokens)
        trees.append(size.num_nodes)
        passed = SequencePass(ScheduledSequence(sequence, 0, 1, *size), draft, VerifyResult((0,), 0))
        policy.on_pass(pass_record([passed], 0.001 * size.num_tokens, 0.01))
        policy.plan_ahead([sequence])
    assert any(trees[:30]), "trees are tried"
    assert not any(trees[60:])

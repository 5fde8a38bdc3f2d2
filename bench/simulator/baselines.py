"""Routing policies to compare with, which no deployment should choose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from router.routing.load import FleetLoad
from router.routing.policy import CostConfig, Decision, Policy, PolicyInput, cost_terms, rank, shuffle
from router.routing.selector import Ranker

_CONFIG = CostConfig()


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    """A policy by the name it has on the command line; `uses_index` tells whether it looks at prefixes at all."""

    name: str
    rank: Ranker
    uses_index: bool


def power_of_two(request: PolicyInput, fleet: FleetLoad) -> Decision:
    """Ray Serve's default: of two workers drawn at random the one with fewer requests, waiting and running."""
    order = np.argsort(shuffle(request.seed, fleet))
    if len(order) > 1 and fleet.num_requests[order[1]] < fleet.num_requests[order[0]]:
        order[[0, 1]] = order[[1, 0]]
    return Decision("p2c", request, fleet, cost_terms(request, fleet, _CONFIG), order)


def longest_prefix(request: PolicyInput, fleet: FleetLoad) -> Decision:
    """Return the worker that holds most of the prompt, however busy; equals at random."""
    terms = cost_terms(request, fleet, _CONFIG)
    order = np.lexsort((shuffle(request.seed, fleet), -terms.cached_tokens))
    return Decision("longest_prefix", request, fleet, terms, order)


def _ours(name: str, policy: Policy) -> SimulatedPolicy:
    return SimulatedPolicy(name, partial(rank, policy, config=_CONFIG), uses_index=policy is Policy.PREFIX)


POLICIES: dict[str, SimulatedPolicy] = {
    policy.name: policy
    for policy in (
        _ours("prefix", Policy.PREFIX),
        _ours("least_work", Policy.LOAD),
        _ours("load", Policy.LOAD),
        SimulatedPolicy("p2c", power_of_two, uses_index=False),
        SimulatedPolicy("longest_prefix", longest_prefix, uses_index=True),
        _ours("round_robin", Policy.ROUND_ROBIN),
        _ours("random", Policy.RANDOM),
    )
}

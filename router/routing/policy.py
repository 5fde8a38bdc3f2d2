"""The choice of a worker for a request: each worker's cost in seconds, and the resulting order.

    cost(worker) = queue + prefill + interference + others
    queue        = backlog tokens / prefill rate                   work queued before the request
    prefill      = uncached tokens / prefill rate                  its own prompt, less the blocks the worker holds
    interference = (queue + prefill) * slowdown * decode tokens    prefill time lost to running streams
    others       = prefill * weight * share of workers with work   the delay of later requests by this prefill

The first three are the predicted seconds to the first token. Without the fourth, every request would optimize only for
itself: it would leave its cached prefix to save a moment, and recompute it at the expense of later requests. If every
other worker is idle, no request waits, and the term is zero.

Pure functions: no clock, no state, no side effects; tests and the serving router call the same ones. Everything
is an array over workers [W], so a decision over a thousand workers costs little more than one over eight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from router.routing.load import FleetLoad, FloatArray

IntArray = NDArray[np.intp]

_SPEED_STEP = np.log(1.05)  # decode speeds within 5% of the fastest count as equal to it


class Policy(StrEnum):
    """The order of workers."""

    PREFIX = "prefix"  # by the whole cost
    LOAD = "load"  # by the cost with all caches assumed empty: least work
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """Everything that a policy knows about a request.

    Attributes:
        prefix_blocks: leading blocks that each worker holds (`PrefixIndex.matches`); empty without an answer.
        seed: keys the shuffle of equal workers; equal seeds give equal decisions in every process.
        turn: the request's ordinal number, for `round_robin`.
        last_worker_id: the worker of the session's last request; decides only among equal workers.
        fetch_share: the cost of a token whose KV another worker holds, relative to a computed one; 1 without fetching.
    """

    num_tokens: int
    block_size: int
    prefix_blocks: Mapping[str, int]
    seed: int
    turn: int = 0
    last_worker_id: str | None = None
    fetch_share: float = 1.0


@dataclass(frozen=True, slots=True)
class CostTerms:
    """The cost of every worker, term by term; all [W], seconds unless named otherwise."""

    cached_tokens: FloatArray
    queue_s: FloatArray
    prefill_s: FloatArray
    interference_s: FloatArray
    others_s: FloatArray

    @property
    def ttft_s(self) -> FloatArray:
        """Predicted seconds to the first token."""
        return self.queue_s + self.prefill_s + self.interference_s

    @property
    def total_s(self) -> FloatArray:
        """The cost that ranks workers."""
        return self.ttft_s + self.others_s


@dataclass(frozen=True, slots=True)
class Decision:
    """A ranking of the candidates, best first, with its numbers; `order` indexes `fleet.worker_ids`."""

    policy: str
    request: PolicyInput
    fleet: FleetLoad
    terms: CostTerms
    order: IntArray  # [W]

    @property
    def worker_id(self) -> str:
        """The chosen worker."""
        return self.fleet.worker_ids[int(self.order[0])]

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the chosen worker is expected to hold."""
        return int(self.terms.cached_tokens[self.order[0]])

    def explain(self) -> str:
        """Format the formula with its numbers for the three best workers, as one line for the debug log."""
        return f"{self.policy}: " + "; ".join(self._formula(int(row)) for row in self.order[:3])

    def _formula(self, row: int) -> str:
        fleet, terms = self.fleet, self.terms
        rate = fleet.prefill_tokens_per_s[row]
        uncached = terms.prefill_s[row] * rate
        cached = terms.cached_tokens[row]
        spared = self.request.num_tokens - cached - uncached  # through blocks that another worker holds
        less = f"-{spared:.0f}" if spared >= 1 else ""
        return (
            f"{fleet.worker_ids[row]} {terms.total_s[row]:.4f} s"
            f" = queue {fleet.backlog_tokens[row]:.0f}/{rate:.0f}"
            f" + prefill ({self.request.num_tokens}-{cached:.0f}{less}={uncached:.0f})/{rate:.0f}"
            f" + interference {terms.interference_s[row]:.4f} ({fleet.decode_tokens[row]:.0f} decode tokens)"
            f" + others {terms.others_s[row]:.4f}"
        )


def rank(policy: Policy, request: PolicyInput, fleet: FleetLoad) -> Decision:
    """Order the workers of `fleet` (at least one) for a request.

    The terms always hold the full cost, including prefix hits, whatever the policy. A decision of any policy can thus
    be compared with the cost that `prefix` would have paid.
    """
    assert len(fleet) > 0
    terms = cost_terms(request, fleet)
    order = _ORDERS[policy](request, fleet, terms)
    return Decision(policy, request, fleet, terms, order)


def cost_terms(request: PolicyInput, fleet: FleetLoad) -> CostTerms:
    """Compute the cost of the request on every worker.

    At least one token is always computed: the last one's logits give the first token of the answer.
    """
    cached = cached_tokens(request, fleet)
    queue_s = fleet.backlog_tokens / fleet.prefill_tokens_per_s
    fetched = cached.max() - cached
    prefill_s = (request.num_tokens - cached - (1 - request.fetch_share) * fetched) / fleet.prefill_tokens_per_s
    interference_s = (queue_s + prefill_s) * fleet.decode_slowdown * fleet.decode_tokens
    others_weight = 1.5  # of later requests' delay against the request's own; 0 would ignore later requests
    others_s = prefill_s * (others_weight * float(np.mean(fleet.backlog_tokens > 0)))
    return CostTerms(cached, queue_s, prefill_s, interference_s, others_s)


def cached_tokens(request: PolicyInput, fleet: FleetLoad) -> FloatArray:
    """Return the prompt tokens that each worker can take from its cache: [W], whole blocks, never the last token."""
    tokens = np.zeros(len(fleet))
    hits = request.prefix_blocks
    max_blocks = max(request.num_tokens - 1, 0) // request.block_size
    rows = np.fromiter((fleet.rows.get(worker_id, -1) for worker_id in hits), np.intp, len(hits))
    blocks = np.fromiter(hits.values(), np.float64, len(hits))
    is_candidate = rows >= 0
    tokens[rows[is_candidate]] = np.minimum(blocks[is_candidate], max_blocks) * request.block_size
    return tokens


def shuffle(seed: int, fleet: FleetLoad) -> NDArray[np.uint64]:
    """Return a random number per worker [W] to order equal ones; depends only on `seed` and the worker's id."""
    with np.errstate(over="ignore"):
        mixed = fleet.hashes ^ _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
        return _mix(mixed)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _by_cost(request: PolicyInput, fleet: FleetLoad, terms: CostTerms) -> IntArray:
    # Among workers that hold as much of the prompt, costs within 20 ms of the lowest count as equal to it. Measured
    # rates of equal machines differ by more, and a run of requests with a hot prefix would all go to one worker.
    cost_s, cached = terms.total_s, terms.cached_tokens
    best = int(np.argmin(cost_s))
    return _order_by(cost_s, (cached >= cached[best]) & (cost_s <= cost_s[best] + 0.02), request, fleet)


def _by_load(request: PolicyInput, fleet: FleetLoad, terms: CostTerms) -> IntArray:
    blind = cost_terms(replace(request, prefix_blocks={}), fleet)
    return _order_by(blind.total_s, np.zeros(len(fleet), dtype=np.bool_), request, fleet)


def _in_turn(request: PolicyInput, fleet: FleetLoad, terms: CostTerms) -> IntArray:
    return (np.arange(len(fleet)) + request.turn) % len(fleet)


def _at_random(request: PolicyInput, fleet: FleetLoad, terms: CostTerms) -> IntArray:
    return np.argsort(shuffle(request.seed, fleet))


def _order_by(cost_s: FloatArray, is_even: NDArray[np.bool_], request: PolicyInput, fleet: FleetLoad) -> IntArray:
    """Order by cost, lowest first; break ties by requests, decode speed, session, then at random.

    Costs within 1% and 1 ms of the lowest are a tie, and so are those marked in `is_even` [W].
    """
    is_tied = is_even | (cost_s <= 1.01 * cost_s.min() + 0.001)
    tied, others = np.flatnonzero(is_tied), np.flatnonzero(~is_tied)
    is_elsewhere = tied != fleet.rows.get(request.last_worker_id or "", -1)
    slowness = _slowness(fleet.decode_tokens_per_s[tied])
    num_requests = fleet.num_requests[tied] - ~is_elsewhere  # a session's worker may have one more
    first = np.lexsort((shuffle(request.seed, fleet)[tied], is_elsewhere, slowness, num_requests))
    return np.concatenate([tied[first], others[np.argsort(cost_s[others])]])


def _slowness(decode_tokens_per_s: FloatArray) -> FloatArray:
    """Return how far decode speeds are below the highest, in steps of 5%; accepted drafts count.

    An unmeasured speed counts as the highest.
    """
    fastest = decode_tokens_per_s.max()
    if fastest <= 0:
        return np.zeros_like(decode_tokens_per_s)
    speeds = np.where(decode_tokens_per_s > 0, decode_tokens_per_s, fastest)
    slowness: FloatArray = np.floor(np.log(fastest / speeds) / _SPEED_STEP)
    return slowness


_Order = Callable[[PolicyInput, FleetLoad, CostTerms], IntArray]

_ORDERS: dict[Policy, _Order] = {
    Policy.PREFIX: _by_cost,
    Policy.LOAD: _by_load,
    Policy.ROUND_ROBIN: _in_turn,
    Policy.RANDOM: _at_random,
}

"""One trace, one policy, N workers: the replay and what it measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.simulator.baselines import SimulatedPolicy
from bench.simulator.block_cache import BlockCache
from bench.simulator.channel import Channel, ChannelQuality
from bench.simulator.clock import Clock
from bench.simulator.prefill_pool import PrefillPool
from bench.simulator.rates import ServingRates
from bench.simulator.trace import Trace
from bench.simulator.worker import Job, SimulatedWorker, WorkerPorts
from protos.cache_delta import CacheDelta
from protos.worker_load import WorkerLoad
from router.routing.audit import RouteAudit, RouteForecast, RouteOutcome
from router.routing.load import LoadTable
from router.routing.policy import Decision
from router.routing.prefix_index import PrefixIndex
from router.routing.selector import RouteRequest, Selector

_SNAPSHOT_RETRY_S = 1.0
_STEADY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Fleet:
    """The simulated machines and the wires between them and the router."""

    num_workers: int
    num_cache_blocks: int
    num_prefill_workers: int = 0
    rates: ServingRates = field(default_factory=ServingRates)
    events: ChannelQuality = field(default_factory=ChannelQuality)
    loads: ChannelQuality = field(default_factory=ChannelQuality)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The measurements of one replay.

    Attributes:
        arrived_s: per request, its arrival; later than recorded where a session waited for an answer. [requests]
        ttft_s: per request, from arrival to first token. [requests]
        cached_tokens: per request, prompt tokens found in the worker's cache. [requests]
        busy_s: per worker, seconds of prefill. [workers]
        pool_busy_s: the same, summed over prefill workers.
    """

    trace: Trace
    arrived_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    cached_tokens: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    pool_busy_s: float
    audit: RouteAudit

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were cached."""
        return float(self.cached_tokens.sum()) / self.trace.num_tokens

    @property
    def imbalance(self) -> float:
        """Prefill seconds of the busiest worker over the mean worker's."""
        return float(self.busy_s.max() / self.busy_s.mean()) if self.busy_s.any() else 1.0

    def load(self, num_machines: int) -> float:
        """Share of time for which prefill kept `num_machines` busy, while nine tenths of the requests arrived.

        The last tenth is left out because a few long sessions may stretch it over as much time again.
        """
        end_s = float(np.quantile(self.arrived_s, _STEADY_SHARE))
        prompt_tokens = np.array([request.num_tokens for request in self.trace.requests])
        uncached_tokens = prompt_tokens - self.cached_tokens
        early_share = uncached_tokens[self.arrived_s <= end_s].sum() / uncached_tokens.sum()
        return float((self.busy_s.sum() + self.pool_busy_s) * early_share / (num_machines * end_s))


def replay(trace: Trace, policy: SimulatedPolicy, fleet: Fleet) -> ReplayResult:
    """Replay `trace` under `policy`; the same arguments always give the same result."""
    return _Replay(trace, policy, fleet).run()


class _Replay:
    """The state of one replay: router, workers and wires on one clock."""

    def __init__(self, trace: Trace, policy: SimulatedPolicy, fleet: Fleet) -> None:
        self._trace = trace
        self._policy = policy
        self._clock = Clock()
        # Nothing is under way in a simulated network, so a load signal covers all that was sent until it was measured.
        loads = LoadTable(transit_s=0.0, default_prefill_tokens_per_s=fleet.rates.prefill_tokens_per_s)
        self._selector = Selector(policy.rank, trace.block_size, PrefixIndex(), loads)
        self._load_channel: Channel[WorkerLoad] = Channel(self._clock, fleet.loads, loads.update, seed=1)
        self._event_channel: Channel[Callable[[], None]] = Channel(self._clock, fleet.events, _call, seed=2)
        self._pool = PrefillPool(fleet.num_prefill_workers, fleet.rates) if fleet.num_prefill_workers else None
        self._workers = {
            worker.worker_id: worker for worker in map(partial(self._worker, fleet), range(fleet.num_workers))
        }
        self._candidates = tuple(self._workers)
        self._asked_at_s: dict[str, float] = {}
        self._decisions: dict[int, Decision] = {}
        self._sessions = _SessionOrder(trace)
        self._arrived_s = np.zeros(len(trace.requests))
        self._ttft_s = np.zeros(len(trace.requests))
        self._cached_tokens = np.zeros(len(trace.requests), dtype=np.int64)
        self._audit = RouteAudit()

    def run(self) -> ReplayResult:
        for number, request in enumerate(self._trace.requests):
            self._clock.at(request.arrival_s, partial(self._due, number))
        self._clock.run()
        busy_s = np.array([worker.busy_s for worker in self._workers.values()])
        pool_busy_s = self._pool.busy_s if self._pool else 0.0
        return ReplayResult(
            self._trace, self._arrived_s, self._ttft_s, self._cached_tokens, busy_s, pool_busy_s, self._audit
        )

    def _worker(self, fleet: Fleet, number: int) -> SimulatedWorker:
        ports = WorkerPorts(self._first_token, self._ended, self._load_channel.send, self._send_change)
        cache = BlockCache(fleet.num_cache_blocks)
        name = f"worker-{number}"
        return SimulatedWorker(name, self._clock, cache, fleet.rates, self._trace.block_size, ports, self._pool)

    def _due(self, number: int) -> None:
        if self._sessions.may_arrive(number):
            self._arrive(number)

    def _ended(self, job: Job) -> None:
        """The answer is complete: if the session's next request has been waiting for it, that one arrives now."""
        following = self._sessions.ended(job.number)
        if following is not None:
            self._arrive(following)

    def _arrive(self, number: int) -> None:
        request = self._trace.requests[number]
        self._arrived_s[number] = self._clock.now_s
        keys = request.keys if self._policy.uses_index else ()
        asked = RouteRequest(str(number), request.num_tokens, keys, seed=number, session_id=request.session_id)
        decision = self._selector.select(asked, self._candidates, self._clock.now_s)
        self._decisions[number] = decision
        self._workers[decision.worker_id].accept(number, request)

    def _first_token(self, worker_id: str, job: Job) -> None:
        self._ttft_s[job.number] = self._clock.now_s - self._arrived_s[job.number]
        self._cached_tokens[job.number] = job.num_cached_blocks * self._trace.block_size
        decision = self._decisions.pop(job.number)
        if self._policy.uses_index:
            self._audit.observe(route_outcome(decision, job.num_cached_blocks))

    def _send_change(self, worker_id: str, sequence: int, delta: CacheDelta) -> None:
        if self._policy.uses_index:
            self._event_channel.send(partial(self._take_change, worker_id, sequence, delta))

    def _take_change(self, worker_id: str, sequence: int, delta: CacheDelta) -> None:
        self._selector.index.apply(worker_id, 0, sequence, (delta,))
        if self._selector.index.is_in_doubt(worker_id):
            self._ask_snapshot(worker_id)

    def _ask_snapshot(self, worker_id: str) -> None:
        """Ask over the same wire.

        A lost answer is asked for again with the next events, not before a second has passed.
        """
        now_s = self._clock.now_s
        if now_s - self._asked_at_s.get(worker_id, -_SNAPSHOT_RETRY_S) >= _SNAPSHOT_RETRY_S:
            self._asked_at_s[worker_id] = now_s
            self._event_channel.send(partial(self._answer_snapshot, worker_id))

    def _answer_snapshot(self, worker_id: str) -> None:
        self._event_channel.send(partial(self._take_snapshot, worker_id, *self._workers[worker_id].snapshot()))

    def _take_snapshot(self, worker_id: str, sequence: int, keys: bytes) -> None:
        self._selector.index.resync(worker_id, 0, sequence, keys)


class _SessionOrder:
    """The order of a session: a request waits for the answer to its predecessor."""

    def __init__(self, trace: Trace) -> None:
        self._next: dict[int, int] = {}
        self._is_blocked: set[int] = set()  # the predecessor is not answered
        self._is_due: set[int] = set()  # its time has come, and it waits
        last: dict[str, int] = {}
        for number, request in enumerate(trace.requests):
            if request.session_id in last:
                self._next[last[request.session_id]] = number
                self._is_blocked.add(number)
            if request.session_id:
                last[request.session_id] = number

    def may_arrive(self, number: int) -> bool:
        """True if a request whose time has come may arrive; if not, `ended` will name it later."""
        if number in self._is_blocked:
            self._is_due.add(number)
            return False
        return True

    def ended(self, number: int) -> int | None:
        """Note a complete answer; returns the request that had to wait for it, if one did."""
        following = self._next.get(number)
        if following is None:
            return None
        self._is_blocked.discard(following)
        return following if following in self._is_due else None


def route_outcome(decision: Decision, achieved_blocks: int) -> RouteOutcome:
    """Return a decision and what came of it, in the audit's terms."""
    block_size = decision.request.block_size
    best = decision.ranked(1)[0]
    others_s = np.delete(decision.terms.total_s, decision.order[0])
    forecast = RouteForecast(
        predicted_blocks=best.cached_tokens // block_size,
        achievable_blocks=int(decision.terms.cached_tokens.max()) // block_size,
        cost_s=best.total_s,
        runner_up_cost_s=float(others_s.min()) if len(others_s) else float("inf"),
        block_prefill_s=block_size / float(decision.fleet.prefill_tokens_per_s[decision.order[0]]),
    )
    return RouteOutcome(forecast, achieved_blocks)


def _call(action: Callable[[], None]) -> None:
    action()

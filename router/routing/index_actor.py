"""The one process that knows the blocks and the load of every pair: select and reserve, for all ingress replicas.

Select and reserve in one step: look up the prefix, compare loads, choose, and record the work sent.

The choice and its reservation are one call on one state, so a burst that several ingress replicas route at the same
moment spreads as if one had routed it. The caller passes the time; there is no process and no clock here.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import ray

from protos.block_keys import BlockKey, split_keys
from protos.linux import wait_for_cores
from protos.worker_report import PrefixHolder, WorkerReport
from router.config import RouterConfig
from router.routing.load import FleetLoad, LoadTable, SentWork
from router.routing.policy import CostConfig, Decision, Policy, PolicyInput, rank
from router.routing.prefix_index import PrefixIndex
from router.routing.routed_call import RouteQuery, RouteReply

Ranker = Callable[[PolicyInput, FleetLoad], Decision]

_MAX_SESSIONS = 100_000


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The router's view of a request: the keys of its full blocks and its length, without tokens."""

    request_id: str
    num_tokens: int
    keys: Sequence[BlockKey]
    seed: int = 0
    session_id: str = ""


class Selector:
    """The router's state and its one decision.

    Workers' reports feed `index` and `loads`; `select` reads both and adds the work it has just placed.
    """

    def __init__(self, rank: Ranker, block_size: int, index: PrefixIndex, loads: LoadTable) -> None:
        self.index = index
        self.loads = loads
        self._rank = rank
        self._block_size = block_size
        self._turn = 0
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def select(self, request: RouteRequest, candidates: Sequence[str], now_s: float) -> Decision:
        """Choose among `candidates` (at least one) and reserve: blocks and work count for the chosen worker at once.

        Workers that seem to hang are skipped while there are others.
        """
        self.index.expire(now_s)
        candidates = [each for each in candidates if not self.loads.is_silent(each, now_s)] or candidates
        policy_input = PolicyInput(
            num_tokens=request.num_tokens,
            block_size=self._block_size,
            prefix_blocks=self.index.matches(request.keys),
            seed=request.seed,
            turn=self._turn,
            last_worker_id=self._sessions.get(request.session_id),
        )
        decision = self._rank(policy_input, self.loads.view(candidates, now_s))
        self._reserve(request, decision, now_s)
        return decision

    def _reserve(self, request: RouteRequest, decision: Decision, now_s: float) -> None:
        chosen = decision.ranked(1)[0]
        self._turn += 1
        # After its predicted first token a request's blocks may still be unreported.
        self.index.reserve(chosen.worker_id, request.keys, now_s, hold_s=chosen.ttft_s + 1.0)
        uncached_tokens = request.num_tokens - chosen.cached_tokens
        self.loads.sent(chosen.worker_id, SentWork(request.request_id, uncached_tokens, now_s))
        self._remember(request.session_id, chosen.worker_id)

    def _remember(self, session_id: str, worker_id: str) -> None:
        if not session_id:
            return
        self._sessions[session_id] = worker_id
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)


SILENCE_S = 10.0  # a worker silent for this long has left: live ones report every second
logger = logging.getLogger(__name__)


class IndexState:
    """The knowledge of one application's index, without Ray and clock: a `Selector` fed by `WorkerReport`s."""

    def __init__(self, config: RouterConfig) -> None:
        self._block_size = config.block_size
        self._index = PrefixIndex()
        self._loads = LoadTable()
        ranker = partial(rank, Policy(config.policy), config=CostConfig(fetch_share=config.fetch_share))
        self._selector = Selector(ranker, config.block_size, self._index, self._loads)
        self._reported_s: dict[str, float] = {}
        self._not_serving: set[str] = set()

    def report(self, report: WorkerReport, now_s: float) -> bool:
        """Apply a worker's report; return True to request a snapshot."""
        load, worker_id = report.load, report.load.worker_id
        self._reported_s[worker_id] = now_s
        (self._not_serving.discard if report.is_serving else self._not_serving.add)(worker_id)
        self._loads.update(replace(load, measured_at_s=now_s - report.load_age_s))
        if report.snapshot is not None:
            self._index.resync(worker_id, load.epoch, report.sequence - 1, report.snapshot)
        self._index.apply(worker_id, load.epoch, report.sequence, report.deltas)
        return self._index.is_in_doubt(worker_id)

    def select(self, query: RouteQuery, now_s: float) -> RouteReply:
        """Choose and reserve; candidates without a serving target are used only if no other is left."""
        if query.refused_by is not None:
            self._loads.withdraw(query.refused_by, query.request_id)
        serving = [worker_id for worker_id in query.candidates if worker_id not in self._not_serving]
        request = RouteRequest(
            query.request_id,
            query.num_tokens,
            split_keys(query.keys),
            zlib.crc32(query.request_id.encode()),
            query.session_id,
        )
        decision = self._selector.select(request, serving or query.candidates, now_s)
        self._reported_s.setdefault(decision.worker_id, now_s)
        reply = self._reply(decision, query.is_explained)
        return replace(reply, holder=self._holder(request, decision)) if query.wants_holder else reply

    def withdraw(self, worker_id: str, request_id: str) -> None:
        """End the reservation of a request that the worker did not take."""
        self._loads.withdraw(worker_id, request_id)

    def forget(self, worker_id: str) -> None:
        """Drop a worker that has left; if it reports again, it must send a snapshot."""
        self._index.forget(worker_id)
        self._loads.forget(worker_id)
        self._reported_s.pop(worker_id, None)
        self._not_serving.discard(worker_id)

    def forget_silent(self, now_s: float) -> list[str]:
        """Forget the workers that have been silent for ten seconds, and return their ids."""
        silent = [worker_id for worker_id, reported_s in self._reported_s.items() if now_s - reported_s > SILENCE_S]
        for worker_id in silent:
            self.forget(worker_id)
        return silent

    def _holder(self, request: RouteRequest, decision: Decision) -> PrefixHolder | None:
        """Find the candidate that has reported more of the prefix than the chosen worker is expected to hold."""
        num_known = decision.ranked(1)[0].cached_tokens // self._block_size
        others = [worker_id for worker_id in decision.fleet.worker_ids if worker_id != decision.worker_id]
        return self._index.longest_held(request.keys, others, num_known)

    def _reply(self, decision: Decision, is_explained: bool) -> RouteReply:
        costs = decision.ranked()
        chosen = costs[0]
        rate = float(decision.fleet.prefill_tokens_per_s[decision.order[0]])
        return RouteReply(
            worker_ids=tuple(cost.worker_id for cost in costs),
            predicted_blocks=chosen.cached_tokens // self._block_size,
            achievable_blocks=max(cost.cached_tokens for cost in costs) // self._block_size,
            cost_s=chosen.total_s,
            runner_up_cost_s=min((cost.total_s for cost in costs[1:]), default=float("inf")),
            block_prefill_s=self._block_size / rate,
            formula=decision.explain() if is_explained else "",
            num_known_blocks=len(self._index),
            num_doubtful_workers=len(self._index.needs_snapshot()),
        )


class IndexActor:
    """An `IndexState` as a Ray actor. No method awaits anything, so calls are atomic and choices never interleave.

    Ray restarts it empty after a crash. The pairs' next reports, within a second, then show a gap, so it requests a
    snapshot from each pair. Ingress replicas and pairs come and go, so no process owns it; it exits once no pair has
    reported for half a minute.
    """

    def __init__(self, config: RouterConfig) -> None:
        wait_for_cores()
        self._state = IndexState(config)
        self._last_report_s = time.monotonic()
        self._sweeper: asyncio.Task[None] | None = None

    async def report(self, report: WorkerReport) -> bool:
        """Apply a worker's report; return True to request a snapshot."""
        self._last_report_s = time.monotonic()
        self._start_sweeping()
        return self._state.report(report, self._last_report_s)

    async def select(self, query: RouteQuery) -> RouteReply:
        """Choose a worker for a request and reserve it."""
        self._start_sweeping()
        return self._state.select(query, time.monotonic())

    async def withdraw(self, worker_id: str, request_id: str) -> None:
        """End the reservation of a request that the worker did not take."""
        self._state.withdraw(worker_id, request_id)

    async def forget(self, worker_id: str) -> None:
        """Drop a worker that has left."""
        self._state.forget(worker_id)

    def _start_sweeping(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="sweeper")

    async def _sweep(self) -> None:
        longest_s = 30.0  # without a report: then the application has ended
        while time.monotonic() - self._last_report_s < longest_s:
            await asyncio.sleep(1.0)
            for worker_id in self._state.forget_silent(time.monotonic()):
                logger.warning("pair %s has not reported for a while; its blocks are forgotten", worker_id)
        logger.info("no pair has reported for %.0f s; the index exits", longest_s)
        ray.kill(ray.get_runtime_context().current_actor)

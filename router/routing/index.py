"""The one process that knows the blocks and the load of every pair, and chooses for all ingress replicas.

A choice and its reservation are one call on one state: look up the prefix, compare loads, choose, and record the work
sent. So a burst that several ingress replicas route at the same moment spreads as if one had routed it.

Pairs and ingress replicas reach it through a client, with a deadline, and with pauses while it does not answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from protos.backoff import BackoffGate
from protos.block_keys import PrefixHolder, WorkerReport, split_keys
from protos.errors import UnavailableError
from protos.linux import wait_for_cores
from router.config import RouterConfig
from router.routing.load import LoadTable, SentWork
from router.routing.policy import Decision, Policy, PolicyInput, rank
from router.routing.prefix_index import PrefixIndex
from router.routing.routed_call import RouteQuery, RouteReply

logger = logging.getLogger(__name__)

SILENCE_S = 10.0  # a worker silent for this long has left: live ones report every second
_MAX_SESSIONS = 100_000
_NAMESPACE = "outrider"

Reply = TypeVar("Reply")


class IndexState:
    """The knowledge of one application's index and its one decision, without Ray and clock.

    Workers' reports feed `index` and `loads`; `choose` reads both and adds the work it has just placed.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.index = PrefixIndex()
        self.loads = LoadTable()
        self._block_size = config.block_size
        self._policy, self._fetch_share = Policy(config.policy), config.fetch_share
        self._turn = 0
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._reported_s: dict[str, float] = {}
        self._not_serving: set[str] = set()

    def report(self, report: WorkerReport, now_s: float) -> bool:
        """Apply a worker's report; return True to request a snapshot."""
        load, worker_id = report.load, report.load.worker_id
        self._reported_s[worker_id] = now_s
        if report.is_serving:
            self._not_serving.discard(worker_id)
        else:
            self._not_serving.add(worker_id)
        self.loads.update(replace(load, measured_at_s=now_s - report.load_age_s))
        if report.snapshot is not None:
            self.index.resync(worker_id, load.epoch, report.sequence - 1, report.snapshot)
        self.index.apply(worker_id, load.epoch, report.sequence, report.deltas)
        return self.index.is_in_doubt(worker_id)

    def select(self, query: RouteQuery, now_s: float) -> RouteReply:
        """Choose and reserve; reply with the choice and its reasons."""
        decision = self.choose(query, now_s)
        self._reported_s.setdefault(decision.worker_id, now_s)
        reply = self._reply(decision, query.is_explained)
        return replace(reply, holder=self._holder(query, decision)) if query.wants_holder else reply

    def choose(self, query: RouteQuery, now_s: float) -> Decision:
        """Choose among the candidates and reserve: blocks and work count for the chosen worker at once.

        Candidates without a serving target, and those that seem to hang, are used only if no other is left.
        """
        # Candidates: serving and not silent, else all.
        if query.refused_by is not None:
            self.loads.withdraw(query.refused_by, query.request_id)
        self.index.expire(now_s)
        serving = [each for each in query.candidates if each not in self._not_serving] or query.candidates
        candidates = [each for each in serving if not self.loads.is_silent(each, now_s)] or serving
        keys = split_keys(query.keys)
        policy_input = PolicyInput(
            num_tokens=query.num_tokens,
            block_size=self._block_size,
            prefix_blocks=self.index.matches(keys),
            seed=zlib.crc32(query.request_id.encode()),
            turn=self._turn,
            last_worker_id=self._sessions.get(query.session_id),
            fetch_share=self._fetch_share,
        )
        decision = rank(self._policy, policy_input, self.loads.view(candidates, now_s))
        # Reserve on the chosen worker.
        worker_id = decision.worker_id
        self._turn += 1
        # After its predicted first token a request's blocks may still be unreported.
        ttft_s = float(decision.terms.ttft_s[decision.order[0]])
        self.index.reserve(worker_id, keys, now_s, hold_s=ttft_s + 1.0)
        self.loads.sent(worker_id, SentWork(query.request_id, query.num_tokens - decision.cached_tokens, now_s))
        self._remember(query.session_id, worker_id)
        return decision

    def _remember(self, session_id: str, worker_id: str) -> None:
        if not session_id:
            return
        self._sessions[session_id] = worker_id
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def withdraw(self, worker_id: str, request_id: str) -> None:
        """End the reservation of a request that the worker did not take."""
        self.loads.withdraw(worker_id, request_id)

    def forget(self, worker_id: str) -> None:
        """Drop a worker that has left; if it reports again, it must send a snapshot."""
        self.index.forget(worker_id)
        self.loads.forget(worker_id)
        self._reported_s.pop(worker_id, None)
        self._not_serving.discard(worker_id)

    def forget_silent(self, now_s: float) -> list[str]:
        """Forget the workers that have been silent for ten seconds, and return their ids."""
        silent = [worker_id for worker_id, reported_s in self._reported_s.items() if now_s - reported_s > SILENCE_S]
        for worker_id in silent:
            self.forget(worker_id)
        return silent

    def _holder(self, query: RouteQuery, decision: Decision) -> PrefixHolder | None:
        """Find the candidate that has reported more of the prefix than the chosen worker is expected to hold."""
        num_known = decision.cached_tokens // self._block_size
        others = [worker_id for worker_id in decision.fleet.worker_ids if worker_id != decision.worker_id]
        return self.index.longest_held(split_keys(query.keys), others, num_known)

    def _reply(self, decision: Decision, is_explained: bool) -> RouteReply:
        fleet, order = decision.fleet, decision.order
        costs_s = decision.terms.total_s[order]
        rate = float(fleet.prefill_tokens_per_s[order[0]])
        return RouteReply(
            worker_ids=tuple(fleet.worker_ids[row] for row in order),
            predicted_blocks=decision.cached_tokens // self._block_size,
            achievable_blocks=int(decision.terms.cached_tokens.max()) // self._block_size,
            cost_s=float(costs_s[0]),
            runner_up_cost_s=float(costs_s[1:].min(initial=float("inf"))),
            block_prefill_s=self._block_size / rate,
            formula=decision.explain() if is_explained else "",
            num_known_blocks=len(self.index),
            num_doubtful_workers=len(self.index.needs_snapshot()),
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


class IndexTimeoutError(UnavailableError):
    """The index did not answer in time."""


class IndexClient:
    """The index of one application, found by name, and started by its first user.

    The name includes a digest of the configuration, so a deployment with another policy or block size gets its own
    index.

    Args:
        application: name of the Serve application.
        config: the index's configuration.
        connect: returns the actor's handle; it may block and runs in a thread.
        clock: seconds, for the pauses.
    """

    def __init__(
        self,
        application: str,
        config: RouterConfig,
        connect: Callable[[str, RouterConfig], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        digest = hashlib.blake2b(repr(config).encode(), digest_size=4).hexdigest()
        self._name = f"outrider-index-{application}-{digest}"
        self._config = config
        self._connect = connect or _get_or_create
        self._gate = BackoffGate(first_s=0.1, longest_s=2.0, clock=clock)  # a late reply ends a pause without queries
        self._actor: Any = None
        self._connecting: asyncio.Task[Any] | None = None

    def warm_up(self) -> None:
        """Find the index in the background, ahead of the first request; does nothing without an event loop."""
        with suppress(RuntimeError):
            self._connecting = asyncio.get_running_loop().create_task(self._find(), name="index-connect")

    async def select(self, query: RouteQuery) -> RouteReply:
        """Choose and reserve.

        Raises:
            UnavailableError: no reply within `index_timeout_s`, or the last query failed a moment ago.
        """
        if not self._gate.is_open:
            raise UnavailableError("the index has just failed to answer")

        def take_back(reply: RouteReply) -> None:
            self.withdraw(reply.worker_ids[0], query.request_id)

        return await self._call(lambda actor: actor.select.remote(query), self._config.index_timeout_s, take_back)

    async def report(self, report: WorkerReport) -> bool:
        """Send a worker's report; True requests its snapshot.

        Raises:
            UnavailableError: no reply within two seconds.
        """
        return await self._call(lambda actor: actor.report.remote(report), timeout_s=2.0)

    def withdraw(self, worker_id: str, request_id: str) -> None:
        """End a reservation, without waiting for a reply; does nothing without an index."""
        self._send(lambda actor: actor.withdraw.remote(worker_id, request_id))

    def forget(self, worker_id: str) -> None:
        """Report that a worker has left, without waiting for a reply."""
        self._send(lambda actor: actor.forget.remote(worker_id))

    def _send(self, send: Callable[[Any], object]) -> None:
        if self._actor is not None:
            try:
                send(self._actor)
            except RayError as error:
                logger.debug("the index did not get a message: %s", error)

    async def _call(
        self,
        send: Callable[[Any], Awaitable[Reply]],
        timeout_s: float,
        on_late: Callable[[Reply], None] = lambda reply: None,
    ) -> Reply:
        """Return the actor's reply; `on_late` gets one that comes after the deadline."""
        answering: asyncio.Future[Reply] | None = None
        try:
            async with asyncio.timeout(timeout_s):
                # Shielded: a late reply still reaches `on_late`.
                answering = asyncio.ensure_future(send(await self._connected()))
                reply = await asyncio.shield(answering)
        except (TimeoutError, asyncio.CancelledError) as error:
            if answering is not None:
                answering.add_done_callback(partial(self._late, on_late))
            if isinstance(error, asyncio.CancelledError):
                raise
            self._gate.failed()
            raise IndexTimeoutError(f"the index did not answer within {timeout_s} s") from None
        except RayActorError as error:
            self._actor = None  # it may have exited for good; the name leads to a new one
            self._gate.failed()
            raise UnavailableError(f"the index is gone: {error}") from error
        except (RayError, ValueError) as error:
            self._gate.failed()
            raise UnavailableError(f"the index failed: {error}") from error
        self._gate.succeeded()
        return reply

    def _late(self, on_late: Callable[[Reply], None], answering: asyncio.Future[Reply]) -> None:
        """Handle a reply after its deadline: the index is alive, so the pause ends."""
        if not answering.cancelled() and answering.exception() is None:
            self._gate.succeeded()
            on_late(answering.result())

    async def _connected(self) -> Any:
        if self._actor is None:
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._find(), name="index-connect")
            try:
                self._actor = await asyncio.shield(self._connecting)
            finally:
                if self._connecting.done():
                    self._connecting = None
        return self._actor

    async def _find(self) -> Any:
        return await asyncio.to_thread(self._connect, self._name, self._config)


def open_prefill_index(application: str, config: RouterConfig) -> IndexClient:
    """Return the index of an application's prefill replicas, separate from the index of its pairs."""
    # A safe estimate: the replica has measured it, and computes where that is faster.
    return IndexClient(f"{application}-prefill", replace(config, fetch_share=0.5))


def _get_or_create(name: str, config: RouterConfig) -> Any:
    """Return the actor with this name. It needs no CPU of its own, and Ray restarts it on any node."""
    options = {"name": name, "namespace": _NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
    return ray.remote(IndexActor).options(**options, max_restarts=-1, num_cpus=0).remote(config)

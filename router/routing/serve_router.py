"""Ray Serve's interface to routing: replicas in, ranks of replicas out; `RouteChooser` decides.

Serve pickles this module by value into every process that calls the pairs, so it has no state of its own.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from protos.block_keys import block_keys, join_keys, root_key
from protos.errors import UnavailableError
from protos.messages import GenerateRequest
from router.config import RouterConfig
from router.routing.index import IndexClient, IndexTimeoutError, open_prefill_index
from router.routing.routed_call import Route, RoutedCall, RouteQuery, RouteReply

logger = logging.getLogger(__name__)

Ranks = list[list[str]]  # worker ids; the workers of one rank are tried together, the least busy first


class RouteChooser:
    """Queries the index and fails open: within the index's deadline there is an order in any case."""

    def __init__(self, index: IndexClient, draw: random.Random | None = None) -> None:
        self._index = index
        self._draw = draw or random.Random()

    async def choose(self, call: RoutedCall, worker_ids: Sequence[str]) -> Ranks:
        """Order the workers for a call, and record the route in it. A second query ends the earlier reservation."""
        started_s = time.perf_counter()
        reply, failure = await self._query(call, worker_ids)
        call.route = Route(time.perf_counter() - started_s, reply, failure)
        if reply is None:
            call.withdraw = None
            return self.by_load(worker_ids)
        chosen = reply.worker_ids[0]
        call.withdraw = lambda: self._index.withdraw(chosen, call.request.request_id)
        if call.is_over:
            call.withdraw()
        logger.debug("request %s: %s", call.request.request_id, reply.formula)
        ranked = reply.worker_ids[:3]  # pairs after them are ordered by load
        rest = [worker_id for worker_id in worker_ids if worker_id not in ranked]
        return [*([worker_id] for worker_id in ranked), *self.by_load(rest)]

    def by_load(self, worker_ids: Sequence[str]) -> Ranks:
        """Put all pairs in one rank; Serve takes the first pair with the fewest requests."""
        return [self._draw.sample(worker_ids, len(worker_ids))] if worker_ids else []

    def routed(self, call: RoutedCall, worker_id: str) -> None:
        """Record that the call went to `worker_id`; a reservation elsewhere ends, and its reply is dropped."""
        call.is_taken = True
        if call.route is None or call.route.reply is None or call.route.reply.worker_ids[0] == worker_id:
            return
        if call.withdraw is not None:
            call.withdraw()
        call.withdraw = None
        call.route = Route(call.route.decision_s, None, "diverted")

    async def _query(self, call: RoutedCall, worker_ids: Sequence[str]) -> tuple[RouteReply | None, str]:
        try:
            return await self._index.select(_query_for(call, worker_ids)), ""
        except IndexTimeoutError:
            return None, "timeout"
        except UnavailableError:
            return None, "away"
        except Exception:  # Serve's router must never raise: the request would hang
            logger.exception("request %s: no route from the index", call.request.request_id)
            return None, "error"


def _query_for(call: RoutedCall, worker_ids: Sequence[str]) -> RouteQuery:
    request, before = call.request, call.route
    return RouteQuery(
        request_id=request.request_id,
        num_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
        keys=call.keys,
        session_id=request.session_id,
        candidates=tuple(worker_ids),
        refused_by=before.reply.worker_ids[0] if before and before.reply else None,
        is_explained=call.is_explained or logger.isEnabledFor(logging.DEBUG),
        wants_holder=call.wants_holder,
    )


class PrefixAwareRouter(RequestRouter):
    """Orders replicas for each `RoutedCall` by `RouteChooser`, and for every other call by load.

    `request_router_kwargs` are the fields of `RouterConfig`. A worker's id is its replica's unique id.
    """

    def initialize_state(self, **settings: Any) -> None:
        self._index = self._open_index(RouterConfig(**settings))
        self._index.warm_up()
        self._chooser = RouteChooser(self._index)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas, best first. Never raises: Serve would leave the request hanging."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # else Serve asks a full fleet in a busy loop
        call = self._call_of(pending_request)
        if call is None or pending_request is None:
            ranks = self._chooser.by_load(list(replicas))
        else:
            ranks = await self._chooser.choose(call, list(replicas))
            self._chosen(call, pending_request)
        return [[replicas[worker_id] for worker_id in rank if worker_id in replicas] for rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Record that a replica has taken the request."""
        call = self._call_of(pending_request)
        if call is not None:
            self._chooser.routed(call, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Apply a changed fleet; replicas that have left are forgotten at once."""
        before = {replica_id.unique_id for replica_id in self.curr_replicas}
        super().update_replicas(replicas)
        for worker_id in before - {replica.replica_id.unique_id for replica in replicas}:
            self._index.forget(worker_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that a call found dead, ahead of Serve's controller."""
        super().on_replica_actor_died(replica_id)
        self._index.forget(replica_id.unique_id)

    def _open_index(self, config: RouterConfig) -> IndexClient:
        return IndexClient(self.app_name, config)

    def _chosen(self, call: RoutedCall, pending_request: PendingRequest) -> None:
        """Add the route's results to the request; the call itself already has the route."""

    def _call_of(self, pending_request: PendingRequest | None) -> RoutedCall | None:
        if pending_request is None or not pending_request.args:
            return None
        call = pending_request.args[0]
        return call if isinstance(call, RoutedCall) else None


class PrefillRouter(PrefixAwareRouter):
    """Orders prefill replicas for each order of a pair, by their own caches and queues in a separate index.

    The two arguments are the order of the pair's engine and its KV layout (`engine.remote_prefill.kv_transfer`). The
    router adds the replica that holds more of the prefix than the chosen one, which copies those blocks from there.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        holder_id = pending_request.kwargs.get("holder_id") if pending_request is not None else None
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == holder_id]
        return [named] if named else await super().choose_replicas(candidate_replicas, pending_request)

    def _chosen(self, call: RoutedCall, pending_request: PendingRequest) -> None:
        reply = call.route.reply if call.route else None
        pending_request.kwargs["holder"] = reply.holder if reply else None

    def _open_index(self, config: RouterConfig) -> IndexClient:
        return open_prefill_index(self.app_name, config)

    def _call_of(self, pending_request: PendingRequest | None) -> RoutedCall | None:
        if pending_request is None or pending_request.metadata.call_method != "prefill":
            return None
        order, layout = pending_request.args[:2]
        root = root_key(layout.model_version, order.cache_salt)
        keys = join_keys(block_keys(order.token_ids, layout.block_size, root))
        return RoutedCall(GenerateRequest(order.request_id, order.token_ids), keys, wants_holder=True)

"""Ray Serve's interface to routing: replicas in, ranks of replicas out; `RouteChooser` decides.

Serve pickles this module by value into every process that calls the pairs, so it has no state of its own.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from protos.block_keys import block_keys, join_keys, root_key
from protos.messages import GenerateRequest
from router.config import RouterConfig
from router.routing.index_client import IndexClient, open_prefill_index
from router.routing.route_chooser import RouteChooser
from router.routing.routed_call import RoutedCall

logger = logging.getLogger(__name__)


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

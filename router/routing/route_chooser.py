"""The order of pairs for a call: from the index, or by load if the index does not answer."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Protocol

from protos.errors import UnavailableError
from router.routing.index_client import IndexTimeoutError
from router.routing.routed_call import Route, RoutedCall, RouteQuery, RouteReply

logger = logging.getLogger(__name__)

_NUM_RANKED = 3  # pairs after them are ordered by load

Ranks = list[list[str]]  # worker ids; the workers of one rank are tried together, the least busy first


class RouteIndex(Protocol):
    """The part of `router.routing.index_client.IndexClient` that the choice needs."""

    async def select(self, query: RouteQuery) -> RouteReply: ...

    def withdraw(self, worker_id: str, request_id: str) -> None: ...


class RouteChooser:
    """Queries the index and fails open: within the index's deadline there is an order in any case."""

    def __init__(self, index: RouteIndex, draw: random.Random | None = None) -> None:
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
        ranked = reply.worker_ids[:_NUM_RANKED]
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

"""Which pairs to try for a call, best first: the index's word, or every pair alike when it has none."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Protocol

from protos.errors import UnavailableError
from router.routing.index.index_client import IndexTimeoutError
from router.routing.index.index_messages import RouteAnswer, RouteAsk
from router.routing.routed_call import Route, RoutedCall

logger = logging.getLogger(__name__)

_NUM_RANKED = 3  # beyond them every pair is as good as any other

Ranks = list[list[str]]  # worker ids; those of one list are tried together, the least busy first


class RouteIndex(Protocol):
    """What the choice needs of `router.routing.index.index_client.IndexClient`."""

    async def select(self, ask: RouteAsk) -> RouteAnswer: ...

    def withdraw(self, worker_id: str, request_id: str) -> None: ...


class RouteChooser:
    """Asks the index, and fails open: whatever happens to it, there is an order within the index's deadline."""

    def __init__(self, index: RouteIndex, draw: random.Random | None = None) -> None:
        self._index = index
        self._draw = draw or random.Random()

    async def choose(self, call: RoutedCall, worker_ids: Sequence[str]) -> Ranks:
        """Order the workers for a call, and write the route down on it. Asking again ends the earlier reservation."""
        started_s = time.perf_counter()
        answer, failure = await self._ask(call, worker_ids)
        call.route = Route(time.perf_counter() - started_s, answer, failure)
        if answer is None:
            call.withdraw = None
            return self.by_load(worker_ids)
        chosen = answer.worker_ids[0]
        call.withdraw = lambda: self._index.withdraw(chosen, call.request.request_id)
        logger.debug("request %s: %s", call.request.request_id, answer.formula)
        ranked = answer.worker_ids[:_NUM_RANKED]
        rest = [worker_id for worker_id in worker_ids if worker_id not in ranked]
        return [*([worker_id] for worker_id in ranked), *self.by_load(rest)]

    def by_load(self, worker_ids: Sequence[str]) -> Ranks:
        """One rank of all, in which Serve takes the pair with the fewest requests; shuffled, as it takes the first."""
        return [self._draw.sample(worker_ids, len(worker_ids))] if worker_ids else []

    def routed(self, call: RoutedCall, worker_id: str) -> None:
        """The call went to `worker_id`; a reservation elsewhere ends, and the answer says nothing of this worker."""
        call.is_taken = True
        if call.route is None or call.route.answer is None or call.route.answer.worker_ids[0] == worker_id:
            return
        if call.withdraw is not None:
            call.withdraw()
        call.withdraw = None
        call.route = Route(call.route.decision_s, None, "diverted")

    async def _ask(self, call: RoutedCall, worker_ids: Sequence[str]) -> tuple[RouteAnswer | None, str]:
        try:
            return await self._index.select(_ask_for(call, worker_ids)), ""
        except IndexTimeoutError:
            return None, "timeout"
        except UnavailableError:
            return None, "away"
        except Exception:  # Serve's router must never see one: it would hang the request
            logger.exception("request %s: no route from the index", call.request.request_id)
            return None, "error"


def _ask_for(call: RoutedCall, worker_ids: Sequence[str]) -> RouteAsk:
    request, before = call.request, call.route
    return RouteAsk(
        request_id=request.request_id,
        num_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
        keys=call.keys,
        session_id=request.session_id,
        candidates=tuple(worker_ids),
        refused_by=before.answer.worker_ids[0] if before and before.answer else None,
        wants_formula=logger.isEnabledFor(logging.DEBUG),
    )

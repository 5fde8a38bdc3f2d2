"""The state of the application, as Serve's controller reports it.

Serve lets a call wait for a replica even if none will ever start. It also lets a replica that is being replaced serve
its open connections until they close.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState  # type: ignore[attr-defined]  # imported there

logger = logging.getLogger(__name__)

INGRESS = "Ingress"
_PERIOD_S = 2.0
_ANSWER_TIMEOUT_S = 5.0


class ApplicationWatch:
    """Queries Serve's controller about this replica's application, at most once per period."""

    def __init__(self) -> None:
        self._status: ApplicationStatusOverview | None = None
        self._question: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        # a thread of its own: while the controller hangs, calls would use up the shared threads
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="application-watch")

    async def is_deleted(self) -> bool:
        """True if the application is being deleted, as last reported by the controller."""
        await self._ask()
        return self._status is not None and self._status.status == ApplicationStatus.DELETING

    def stay(self) -> Callable[[], Awaitable[bool]]:
        """Return a predicate for an endless stream: true once this replica may be about to end.

        The controller reports how many ingress replicas are stopping, but not which ones. The predicate is true once
        more are stopping than when the stream began.
        """
        min_leaving: int | None = None

        async def is_over() -> bool:
            nonlocal min_leaving
            if await self.is_deleted():
                return True
            num_leaving = self._num_leaving()
            min_leaving = num_leaving if min_leaving is None else min(min_leaving, num_leaving)
            return num_leaving > min_leaving

        return is_over

    def _num_leaving(self) -> int:
        if self._status is None or INGRESS not in self._status.deployments:
            return 0
        return self._status.deployments[INGRESS].replica_states.get(ReplicaState.STOPPING, 0)

    async def _ask(self) -> None:
        if self._question is None or time.monotonic() - self._asked_s > _PERIOD_S:
            self._question = asyncio.create_task(self._listen())
            self._asked_s = time.monotonic()
        await asyncio.shield(self._question)  # a caller that gives up must not cancel it for the others

    async def _listen(self) -> None:
        name = serve.get_replica_context().app_name
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                status = await asyncio.get_running_loop().run_in_executor(self._pool, serve.status)
                self._status = status.applications.get(name, self._status)
        except Exception as error:  # any error of Ray: the controller may be restarting
            logger.warning("Serve's controller did not report the state of this application: %r", error)

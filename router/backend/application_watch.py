"""What becomes of the application: Serve lets a call wait for a replica even where none will ever come, and lets a
replica that is replaced serve its connections for as long as they stay.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState

logger = logging.getLogger(__name__)

INGRESS = "Ingress"
_PERIOD_S = 2.0
_ANSWER_TIMEOUT_S = 5.0


class ApplicationWatch:
    """Asks Serve's controller about the application of this replica, once a period however many want to know."""

    def __init__(self) -> None:
        self._status: ApplicationStatusOverview | None = None
        self._question: asyncio.Task[None] | None = None
        self._asked_s = 0.0

    async def is_deleted(self) -> bool:
        """Whether it is being deleted, as far as the controller has said so."""
        await self._ask()
        return self._status is not None and self._status.status == ApplicationStatus.DELETING

    def stay(self) -> Callable[[], Awaitable[bool]]:
        """For a stream without an end of its own: what to ask whether it has to end, since this replica is about to.

        The controller says how many replicas of the ingress leave, but not which: one more since the stream began.
        """
        least: int | None = None

        async def is_over() -> bool:
            nonlocal least
            if await self.is_deleted():
                return True
            num_leaving = self._num_leaving()
            least = num_leaving if least is None else min(least, num_leaving)
            return num_leaving > least

        return is_over

    def _num_leaving(self) -> int:
        if self._status is None or INGRESS not in self._status.deployments:
            return 0
        return self._status.deployments[INGRESS].replica_states.get(ReplicaState.STOPPING, 0)

    async def _ask(self) -> None:
        if self._question is None or time.monotonic() - self._asked_s > _PERIOD_S:
            self._question = asyncio.create_task(self._listen())
            self._asked_s = time.monotonic()
        await asyncio.shield(self._question)  # one who gives up must not silence it for the others

    async def _listen(self) -> None:
        name = serve.get_replica_context().app_name
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                self._status = (await asyncio.to_thread(serve.status)).applications.get(name, self._status)
        except Exception as error:  # Ray's own, whichever: the controller may be restarting
            logger.warning("Serve's controller does not say what becomes of this application: %r", error)

"""Whether the application is being deleted: Serve lets a call wait for a replica even where none will ever come."""

from __future__ import annotations

import asyncio
import logging
import time

from ray import serve
from ray.serve.schema import ApplicationStatus

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0
_ANSWER_TIMEOUT_S = 5.0


class DeletionWatch:
    """Asks Serve's controller about the application of this replica, once a period however many want to know."""

    def __init__(self) -> None:
        self._answer: asyncio.Task[bool] | None = None
        self._asked_s = 0.0

    async def __call__(self) -> bool:
        """Whether it is being deleted, as far as the controller has said so."""
        if self._answer is None or time.monotonic() - self._asked_s > _PERIOD_S:
            self._answer = asyncio.create_task(_ask())
            self._asked_s = time.monotonic()
        return await asyncio.shield(self._answer)  # one who gives up must not silence it for the others


async def _ask() -> bool:
    name = serve.get_replica_context().app_name
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            applications = (await asyncio.to_thread(serve.status)).applications
    except Exception as error:  # Ray's own, whichever: the controller may be restarting
        logger.warning("Serve's controller does not say whether %r is being deleted: %r", name, error)
        return False
    return name not in applications or applications[name].status == ApplicationStatus.DELETING

"""The admin's orders about the drafts of all pairs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from protos.errors import RequestError, UnavailableError
from protos.served_model import (
    ANSWER_S,
    CHECK_TIMEOUT_S,
    RETURN_S,
    CanaryOutcome,
    CheckDraft,
    DraftOrder,
    DraftReport,
    ShowDraft,
    StopCanary,
    SwapDraft,
    TryDraft,
)
from router.api_keys import current_client
from router.backend import Backend

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_CHECK_S = CHECK_TIMEOUT_S + ANSWER_S
_RETURN_S = RETURN_S + ANSWER_S


class DraftAdmin:
    """Sends an admin's orders to every pair, and calls `on_change` when the drafts may have changed."""

    def __init__(self, backend: Backend, on_change: Callable[[], None]) -> None:
        self._backend = backend
        self._on_change = on_change

    async def show(self) -> Sequence[DraftReport]:
        """Return the draft of every pair.

        Raises:
            PermissionDeniedError: the client is no admin.
            RequestError: drafts have no process of their own.
        """
        current_client.get().require_admin()
        return await self._order(ShowDraft())

    async def swap(self, order: SwapDraft) -> Sequence[DraftReport]:
        """Have every pair run another draft, once all have found it fit; return the drafts that run then.

        Raises:
            PermissionDeniedError: the client is no admin.
            RequestError: drafts have no process of their own, or a pair refuses the checkpoint.
            ConflictError: another order is under way.
            DeadlineExceededError: the new draft did not start in time on a pair, which restores its old one.
        """
        current_client.get().require_admin()
        await self._order(CheckDraft(order.path, order.method), _CHECK_S)
        logger.warning("an admin exchanges the drafts for %s", order.path)
        try:
            return await self._order(order, order.wait_s + _RETURN_S)
        finally:
            self._on_change()

    async def canary(self, order: TryDraft) -> Sequence[DraftReport]:
        """Have every pair try a draft against its own, once all have found it fit; return as soon as they have begun.

        Raises: as `swap`.
        """
        current_client.get().require_admin()
        await self._order(CheckDraft(order.path, order.method), _CHECK_S)
        logger.warning("an admin tries the draft %s", order.path)
        return await self._order(order)

    async def stop_canary(self) -> Sequence[DraftReport]:
        """End the canaries of all pairs, which run their old drafts again.

        Raises:
            PermissionDeniedError: the client is no admin.
            RequestError: no canary runs.
        """
        canaries = [report.canary for report in await self.show()]
        if not any(each is not None and each.outcome is CanaryOutcome.RUNNING for each in canaries):
            raise RequestError("No draft is tried on any pair; there is nothing to stop.")
        return await self._order(StopCanary(), _RETURN_S)

    async def kill(self) -> int:
        """Kill the draft of every pair, as a fault would; return their number.

        Raises:
            PermissionDeniedError: the client is no admin.
            RequestError: no draft has a process of its own.
        """
        current_client.get().require_admin()
        num_killed = await _answered(self._backend.kill_drafts())
        if not num_killed:
            raise RequestError("No draft has a process of its own here: there is nothing to kill.")
        logger.warning("an admin killed %d drafts", num_killed)
        return num_killed

    async def _order(self, order: DraftOrder, timeout_s: float = 10.0) -> Sequence[DraftReport]:
        return await _answered(self._backend.order_drafts(order), timeout_s)


async def _answered(answer: Awaitable[Answer], timeout_s: float = 10.0) -> Answer:
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise UnavailableError(f"The pairs have not answered within {timeout_s:.0f} s.") from None

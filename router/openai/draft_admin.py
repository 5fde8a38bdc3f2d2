"""An admin's orders about the drafts of all pairs: their bodies, the orders, and the answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePath
from typing import Annotated, Literal, NotRequired, TypeVar

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from protos.errors import RequestError, UnavailableError
from protos.served_model import (
    ANSWER_S,
    CHECK_TIMEOUT_S,
    RETURN_S,
    CanaryOutcome,
    CanaryReport,
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
from router.requests.body import Body

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_CHECK_S = CHECK_TIMEOUT_S + ANSWER_S
_RETURN_S = RETURN_S + ANSWER_S


class NoFields(Body):
    """The body of an order without fields: a page of another site cannot send JSON."""


_TRIAL = TryDraft("")


class SwapDrafts(Body):
    """The body of `/admin/drafts/swap`: a folder on the pairs' nodes, and the seconds that its start may take.

    `method` names one of several drafts; left out, it is the deployment's own.
    """

    path: Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^/")]
    wait_s: float = Field(default=120.0, ge=1.0, le=3600.0, strict=False)
    method: str = Field(default="", max_length=32)


class TryDrafts(SwapDrafts):
    """The body of `/admin/drafts/canary`: the limits of the trial (`protos.served_model.TryDraft`)."""

    block_s: float = Field(default=_TRIAL.block_s, ge=0.1, le=3600.0, strict=False)
    deadline_s: float = Field(default=_TRIAL.deadline_s, ge=1.0, le=604_800.0, strict=False)
    min_gain: float = Field(default=_TRIAL.min_gain, gt=0.0, le=10.0, strict=False)
    false_keep: float = Field(default=_TRIAL.false_keep, ge=1e-6, le=0.5, strict=False)
    false_rollback: float = Field(default=_TRIAL.false_rollback, ge=1e-6, le=0.5, strict=False)
    max_pairs: int = Field(default=_TRIAL.max_pairs, ge=4, le=1000)


class CanaryAnswer(TypedDict):
    """The trial of a draft against another; `gain` is new over old goodput minus 1, null while unknown."""

    name: str
    old_name: str
    outcome: Literal["running", "kept", "rolled_back", "stopped"]
    reason: str
    num_pairs: int
    gain: float | None
    low: float | None
    high: float | None


class RunningDraft(TypedDict):
    """A draft model that a pair runs; `name` is its folder's, `digest` its part of `system_fingerprint`."""

    name: str
    method: str  # requests select it by this name
    digest: str
    since: int  # Unix time
    is_deployed: bool  # false after an exchange, until deploy.yaml names it too
    canary: NotRequired[CanaryAnswer]  # the latest
    tuning: NotRequired[str]  # the state of `tune.auto`'s answer to the latest drift alarm


class PairDraftAnswer(RunningDraft):
    """The draft of one pair, as admins see it."""

    replica: str
    path: str


class DraftsAnswer(TypedDict):
    """The answer of `/admin/drafts` and of the orders below it: the draft of every pair."""

    drafts: list[PairDraftAnswer]


class KilledDrafts(TypedDict):
    """The answer of `/admin/drafts/kill`."""

    num_drafts: int


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


def running_draft(report: DraftReport) -> RunningDraft:
    """Return what every client may know: no path of the node."""
    answer = RunningDraft(
        name=_name(report.path),
        method=report.method,
        digest=report.digest,
        since=int(report.since_s),
        is_deployed=report.is_deployed,
    )
    if report.canary is not None:
        answer["canary"] = _canary(report.canary)
    if report.tuning:
        answer["tuning"] = report.tuning
    return answer


def _canary(report: CanaryReport) -> CanaryAnswer:
    return CanaryAnswer(
        name=_name(report.path),
        old_name=_name(report.old_path),
        outcome=report.outcome.value,
        reason=report.reason,
        num_pairs=report.num_pairs,
        gain=report.gain,
        low=report.low,
        high=report.high,
    )


def _name(path: str) -> str:
    return PurePath(path).name


def drafts_answer(reports: Sequence[DraftReport]) -> DraftsAnswer:
    """Return the drafts of every pair."""
    return DraftsAnswer(
        drafts=[
            PairDraftAnswer(**running_draft(report), replica=report.replica, path=report.path) for report in reports
        ]
    )

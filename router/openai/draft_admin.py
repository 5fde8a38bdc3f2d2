"""An admin's orders about the drafts of all pairs: their bodies, the orders, and the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Annotated, Literal, NotRequired

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from protos.errors import RequestError
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
from router.backend import Backend, answered
from router.openai.http_body import BodyReader
from router.requests.body import Body

logger = logging.getLogger(__name__)

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
    """The endpoints below `/admin/drafts`: an admin's orders to every pair.

    Args:
        backend: the pairs.
        bodies: reads the orders' bodies, which are in JSON since pages of other sites cannot send it.
        on_change: called when the drafts may have changed.

    Raises:
        PermissionDeniedError: the client is no admin.
        RequestError: drafts have no process of their own, or a pair refuses the checkpoint.
        ConflictError: another order is under way.
    """

    def __init__(self, backend: Backend, bodies: BodyReader, on_change: Callable[[], None]) -> None:
        self._backend = backend
        self._bodies = bodies
        self._on_change = on_change

    async def show(self) -> Response:
        """List the draft of every pair."""
        return _listed(await self._order(ShowDraft()))

    async def swap(self, request: Request) -> Response:
        """Have every pair run another draft, once all have found it fit; list the drafts that run then.

        Raises:
            DeadlineExceededError: the new draft did not start in time on a pair, which restores its old one.
        """
        body = await self._bodies.read(request, SwapDrafts, is_strict=True)
        order = SwapDraft(**body.model_dump())
        await self._order(CheckDraft(order.path, order.method), _CHECK_S)
        logger.warning("an admin exchanges the drafts for %s", order.path)
        try:
            return _listed(await self._order(order, order.wait_s + _RETURN_S))
        finally:
            self._on_change()

    async def canary(self, request: Request) -> Response:
        """Have every pair try a draft against its own, once all have found it fit; answer when they have begun."""
        body = await self._bodies.read(request, TryDrafts, is_strict=True)
        order = TryDraft(**body.model_dump())
        await self._order(CheckDraft(order.path, order.method), _CHECK_S)
        logger.warning("an admin tries the draft %s", order.path)
        return _listed(await self._order(order))

    async def stop_canary(self, request: Request) -> Response:
        """End the canaries of all pairs, which run their old drafts again."""
        await self._bodies.read(request, NoFields, is_strict=True)
        canaries = [report.canary for report in await self._order(ShowDraft())]
        if not any(each is not None and each.outcome is CanaryOutcome.RUNNING for each in canaries):
            raise RequestError("No draft is tried on any pair; there is nothing to stop.")
        return _listed(await self._order(StopCanary(), _RETURN_S))

    async def kill(self, request: Request) -> Response:
        """Kill the draft of every pair, as a fault would; the text goes on. Answer with the number of drafts."""
        await self._bodies.read(request, NoFields)
        current_client.get().require_admin()
        num_killed = await answered(self._backend.kill_drafts())
        if not num_killed:
            raise RequestError("No draft has a process of its own here: there is nothing to kill.")
        logger.warning("an admin killed %d drafts", num_killed)
        return JSONResponse(KilledDrafts(num_drafts=num_killed))

    async def _order(self, order: DraftOrder, timeout_s: float = 10.0) -> Sequence[DraftReport]:
        current_client.get().require_admin()
        return await answered(self._backend.order_drafts(order), timeout_s)


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


def _listed(reports: Sequence[DraftReport]) -> Response:
    return JSONResponse(drafts_answer(reports))

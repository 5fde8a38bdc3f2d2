"""Bodies of the calls that only admins may make."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from protos.served_draft import TryDraft
from router.requests.body import Body


class KillDrafts(BaseModel):
    """The body of `/admin/drafts/kill`, which has no fields: a page of another site cannot send JSON."""


_TRIAL = TryDraft("")


class SwapDrafts(Body):
    """The body of `/admin/drafts/swap`: a folder on the pairs' nodes, and the seconds that its start may take.

    `method` names one of several drafts; left out, it is the deployment's own.
    """

    path: Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^/")]
    wait_s: float = Field(default=120.0, ge=1.0, le=3600.0, strict=False)
    method: str = Field(default="", max_length=32)


class TryDrafts(SwapDrafts):
    """The body of `/admin/drafts/canary`: the limits of the trial (`protos.served_draft.TryDraft`)."""

    block_s: float = Field(default=_TRIAL.block_s, ge=0.1, le=3600.0, strict=False)
    deadline_s: float = Field(default=_TRIAL.deadline_s, ge=1.0, le=604_800.0, strict=False)
    min_gain: float = Field(default=_TRIAL.min_gain, gt=0.0, le=10.0, strict=False)
    false_keep: float = Field(default=_TRIAL.false_keep, ge=1e-6, le=0.5, strict=False)
    false_rollback: float = Field(default=_TRIAL.false_rollback, ge=1e-6, le=0.5, strict=False)
    max_pairs: int = Field(default=_TRIAL.max_pairs, ge=4, le=1000)


class StopCanaries(Body):
    """The body of `/admin/drafts/canary/stop`, which has no fields."""

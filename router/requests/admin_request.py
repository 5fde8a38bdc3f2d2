"""Bodies of the calls that only admins may make."""

from __future__ import annotations

from pydantic import BaseModel


class KillDrafts(BaseModel):
    """The body of `/admin/drafts/kill`, which has no fields: a page of another site cannot send JSON."""

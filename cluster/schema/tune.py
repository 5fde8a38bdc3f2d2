"""The log that drafts are tuned on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from cluster.schema.section import Section
from engine.config import PositionLogConfig

_GIB = 1 << 30


class TuneSection(Section):
    """The log of verified positions on which `outrider tune` trains: token ids and what the target found likely.

    Setting `log`, a folder on every node with pairs, is the deployment's consent. A request with `store: false`, and
    tenants with `tune_log=false` behind a key (docs/security.md), leave nothing there. Of the others a `share` is
    logged; the oldest files go when there are more than `max_gib`.

    auto: a drift alarm is answered by `minutes` of training beside the pair, on its node and with its log, and a trial
    of the new draft, which is kept if it is faster. Drafts are written beside the log, in a folder `LOG.drafts`.
    """

    log: str | None = Field(default=None, min_length=1)
    max_gib: float = Field(default=1.0, ge=0.1, le=1024, strict=False)
    share: float = Field(default=0.1, gt=0, le=1, strict=False)
    auto: bool = False
    minutes: float = Field(default=10.0, ge=0.1, le=1440, strict=False)

    @property
    def folder(self) -> Path | None:
        """The log's absolute path."""
        return None if self.log is None else Path(os.path.expanduser(self.log)).absolute()

    def to_engine(self) -> PositionLogConfig | None:
        """Return the engine's log; None for none."""
        folder = self.folder
        return None if folder is None else PositionLogConfig(str(folder), int(self.max_gib * _GIB), self.share)

    def conflicts(self) -> Iterator[str]:
        if not self.auto and "minutes" in self.model_fields_set:
            yield f"minutes {self.minutes:g} are for the training that auto begins; set auto to true, or remove them"
        if self.log is None and (given := self.model_fields_set - {"log"}):
            yield f"{', '.join(sorted(given))} is for a log, and there is none; set log to a folder, or remove it"
        if self.log is not None and os.path.expanduser(self.log).startswith("~"):
            yield f"log {self.log!r} is the folder of a user that this machine does not know; give a whole path"
        if self.folder is not None and os.path.exists(self.folder) and not os.path.isdir(self.folder):
            yield f"log {self.log!r} is a file; give a folder, which is made where there is none"
        if self.folder is not None and os.path.isdir(self.folder) and not os.access(self.folder, os.W_OK | os.X_OK):
            yield f"log {self.log!r} is a folder that this user cannot write to; change its owner, or give another"

"""The log that drafts are tuned on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from cluster.schema.section import Section
from engine.config import PositionLogConfig

MAX_LOG_BYTES = 1 << 30  # 2.7 million positions; a training reads the latest million


class TuneSection(Section):
    """The log of verified positions that `outrider tune` trains on: token ids and the target's likeliest tokens.

    Setting `log`, a folder on every node with pairs, is the deployment's consent. Requests with `store: false`, and
    tenants with `tune_log=false` after their key (docs/security.md), are never logged. Of the other requests those with
    `store: true` are logged, and a tenth of those without `store`. Beyond 1 GiB the oldest files are deleted.

    With `auto`, a drift alarm starts ten minutes of training on the pair's node with its log, next to the running pair.
    A trial then keeps the new draft if it is faster. New drafts are written to the folder `LOG.drafts`.
    """

    log: str | None = Field(default=None, min_length=1)
    auto: bool = False

    @property
    def folder(self) -> Path | None:
        """The log's absolute path."""
        return None if self.log is None else Path(os.path.expanduser(self.log)).absolute()

    def to_engine(self) -> PositionLogConfig | None:
        """Return the engine's log, or None without one."""
        folder = self.folder
        return None if folder is None else PositionLogConfig(str(folder), MAX_LOG_BYTES)

    def conflicts(self) -> Iterator[str]:
        if self.log is None and (given := self.model_fields_set - {"log"}):
            yield f"{', '.join(sorted(given))} needs a log, and no log is set; set log to a folder, or remove it"
        if self.log is not None and os.path.expanduser(self.log).startswith("~"):
            yield f"log {self.log!r} is the folder of a user that this machine does not know; give a whole path"
        if self.folder is not None and os.path.exists(self.folder) and not os.path.isdir(self.folder):
            yield f"log {self.log!r} is a file; give a folder, which is created if it is missing"
        if self.folder is not None and os.path.isdir(self.folder) and not os.access(self.folder, os.W_OK | os.X_OK):
            yield f"log {self.log!r} is a folder that this user cannot write to; change its owner, or give another"

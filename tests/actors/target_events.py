"""A `TargetListener` for tests."""

from __future__ import annotations

from actors.shell_messages import Snapshot, Status
from actors.target.index_reporter import TargetListener


class TargetEvents(TargetListener):
    """Records the events of a target."""

    def __init__(self) -> None:
        self.changes: list[str] = []  # ready and lost
        self.snapshots: list[bytes] = []
        self.numbers_running: list[int] = []

    def on_ready(self) -> None:
        self.changes.append("ready")

    def on_status(self, status: Status) -> None:
        self.numbers_running.append(status.engine.num_running)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot.keys)

    def on_lost(self) -> None:
        self.changes.append("lost")

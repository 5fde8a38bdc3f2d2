"""Events of a target, for tests."""

from __future__ import annotations

from actors.shell_messages import Snapshot, Status
from actors.target.index_reporter import TargetEvent


class TargetEvents:
    """Records the events of a target."""

    def __init__(self) -> None:
        self.changes: list[str] = []  # ready and lost
        self.snapshots: list[bytes] = []
        self.numbers_running: list[int] = []

    def __call__(self, event: TargetEvent) -> None:
        match event:
            case Status():
                self.numbers_running.append(event.engine.num_running)
            case Snapshot():
                self.snapshots.append(event.keys)
            case _:
                self.changes.append("lost" if event is None else "ready")

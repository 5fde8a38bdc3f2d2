"""Alarms for fallen acceptance: the active ones, and a call for each new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.accounting.drift import DriftStats


class DriftAlarms:
    """Belongs to the shell's loop."""

    def __init__(self) -> None:
        self.on_alarm: Callable[[str], None] = _ignore  # called with the class of each new alarm
        self._num_alarms: dict[str, int] = {}
        self.ringing: tuple[str, ...] = ()

    def update(self, classes: Sequence[DriftStats]) -> None:
        """Take in the target's present state. A restarted target counts its alarms from zero."""
        self.ringing = tuple(
            f"acceptance of {each.name} is {each.recent:.3f}, and was {each.reference:.3f}"
            for each in classes
            if each.is_alarming
        )
        for each in classes:
            if each.num_alarms > self._num_alarms.get(each.name, 0):
                self.on_alarm(each.name)
            self._num_alarms[each.name] = each.num_alarms


def _ignore(name: str) -> None:
    """Ignore the alarm."""

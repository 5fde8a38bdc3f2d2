"""Alarms for fallen acceptance: the list of active ones, and a webhook call for each new one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from urllib.request import Request, urlopen

from engine.accounting.drift import DriftStats

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_MAX_UNDER_WAY = 4  # a hanging address must not fill the process with threads


class DriftAlarms:
    """Belongs to the shell's loop. Sends nothing without an `address`. A message that fails is logged and dropped."""

    def __init__(self, address: str | None, replica: str) -> None:
        self.on_alarm: Callable[[str], None] = _ignore  # called with the class of each new alarm
        self._address = address
        self._replica = replica
        self._num_alarms: dict[str, int] = {}
        self._sending: set[asyncio.Task[None]] = set()
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
                self._announce(each)
                self.on_alarm(each.name)
            self._num_alarms[each.name] = each.num_alarms

    def _announce(self, stats: DriftStats) -> None:
        if self._address is None or len(self._sending) >= _MAX_UNDER_WAY:
            return
        message = {
            "event": "acceptance_drift",
            "replica": self._replica,
            "class": stats.name,
            "acceptance": round(stats.recent, 4),
            "usual_acceptance": round(stats.reference, 4),
        }
        task = asyncio.create_task(self._send(self._address, json.dumps(message).encode()), name="drift-webhook")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, address: str, body: bytes) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S + 1):
                await asyncio.to_thread(_post, address, body)
        except (OSError, ValueError, TimeoutError) as error:
            logger.warning("pair.alarm_webhook could not be reached: %s", error)


def _ignore(name: str) -> None:
    """Ignore the alarm."""


def _post(address: str, body: bytes) -> None:
    request = Request(address, body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=_TIMEOUT_S):
        pass

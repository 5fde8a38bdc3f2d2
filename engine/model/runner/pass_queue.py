"""Keeps the host at most two passes ahead of a GPU.

Passes that only read prompts have no result that the host reads. Without a wait it would issue them until the driver's
queue is full, so a newcomer would wait for all of them, and the time of a step would not be the time of its pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch


class _Event(Protocol):
    def record(self) -> None:
        """Mark the place after all work issued so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached the place."""


class PassQueue:
    """The passes that are issued to a device and may not be finished; `new_event` makes the event of one."""

    def __init__(self, new_event: Callable[[], _Event]) -> None:
        self._new_event = new_event
        self._events: deque[_Event] = deque()

    @classmethod
    def of(cls, device: torch.device) -> PassQueue | None:
        """None on a device that computes a pass while it is issued."""
        return cls(torch.cuda.Event) if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait for the pass before last; call it before a pass is issued."""
        if len(self._events) == 2:  # one that the device computes, and one that it begins without waiting for the host
            self._events.popleft().synchronize()

    def issued(self) -> None:
        """Add the pass that has just been issued."""
        event = self._new_event()
        event.record()
        self._events.append(event)

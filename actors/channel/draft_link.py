"""The target's connection to its draft process: connects, detects death, and never waits longer than allowed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from actors.channel.draft_messages import PROTOCOL_VERSION, DraftMessage, Hello, Offers, Round
from actors.process.frames import FrameConnection, connect
from protos.frames import ConnectionLostError

logger = logging.getLogger(__name__)


class AdaptiveTimeout:
    """Allows a multiple of the usual reply time. After a miss it allows no time until the draft sends again.

    A draft that hangs therefore costs one wait. A draft that was slow once recovers.
    """

    def __init__(self) -> None:
        self._usual_s: float | None = None
        self._is_silent = False

    @property
    def allowed_s(self) -> float:
        """Seconds that a step may wait now."""
        if self._is_silent:
            return 0.0
        if self._usual_s is None:
            return 1.0
        return min(1.0, max(0.02, 4.0 * self._usual_s))

    def answered(self, latency_s: float) -> None:
        """Note offers that came `latency_s` after the request."""
        self._is_silent = False
        if self._usual_s is None:
            self._usual_s = latency_s
        self._usual_s += 0.1 * (latency_s - self._usual_s)

    def heard(self) -> None:
        """Note offers ahead of a verdict: the draft is alive."""
        self._is_silent = False

    def missed(self) -> None:
        """Note that the requested offers did not come before the deadline."""
        self._is_silent = True


class DraftLink:
    """One connection at a time. `generation` counts draft processes so far; `draft_version` is the latest one's.

    A draft is connected from its `Hello` until its socket ends or stops taking frames. Without a draft every call
    returns at once, and reconnects are tried at most ten times a second.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.generation = 0
        self.is_connected = False
        self.draft_version = ""
        self._path = path
        self._clock = clock
        self._connection: FrameConnection[DraftMessage] | None = None
        self._retry_at_s = 0.0

    def send(self, news: Round) -> bool:
        """Send a round; return False if no draft is connected."""
        if self._connection is None or not self.is_connected:
            return False
        try:
            self._connection.send(news, timeout_s=0.05)
        except ConnectionLostError as error:
            self._drop(error)
            return False
        return True

    def receive(self, timeout_s: float) -> list[Offers]:
        """Return offers, waiting up to `timeout_s` for the first. May accept a new draft's `Hello`."""
        self._reconnect()
        if self._connection is None:
            return []
        try:
            return self._hear(self._connection.receive(timeout_s if self.is_connected else 0.0))
        except ConnectionLostError as error:
            self._drop(error)
            return []

    def close(self) -> None:
        """Close the connection for good; the draft then forgets every sequence."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self.is_connected = False
        self._retry_at_s = float("inf")

    def _reconnect(self) -> None:
        if self._connection is not None or self._clock() < self._retry_at_s:
            return
        self._retry_at_s = self._clock() + 0.1
        self._connection = connect(self._path, DraftMessage)

    def _hear(self, messages: list[DraftMessage]) -> list[Offers]:
        offers = []
        for message in messages:
            if isinstance(message, Hello):
                self._greet(message)
            else:
                offers.append(message)
        return offers

    def _greet(self, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ConnectionLostError(f"it speaks protocol {hello.protocol_version}, not {PROTOCOL_VERSION}")
        self.is_connected = True
        self.draft_version = hello.draft_version
        self.generation += 1
        logger.info("draft connected: version=%s generation=%d", hello.draft_version, self.generation)

    def _drop(self, error: ConnectionLostError) -> None:
        logger.warning("draft lost, decoding goes on without it: %s", error)
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self.is_connected = False

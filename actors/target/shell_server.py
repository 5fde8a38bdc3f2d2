"""The target process's end of the connection to its shell: receives commands, sends steps, answers pings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from actors.engine_loop.engine_loop import AbortAll, EngineLoop
from actors.process.frames import FrameConnection, FrameListener
from actors.shell_messages import (
    DraftChannelStats,
    Ping,
    Pong,
    Refused,
    ShellToTarget,
    Snapshot,
    Status,
    StepOutput,
    TargetReady,
)
from protos.frames import ConnectionLostError
from protos.messages import ModelCard

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_SEND_TIMEOUT_S = 5.0


class ShellServer:
    """Serves one shell at a time. When a shell disconnects or does not read for five seconds, its requests are aborted.

    `run` needs its own thread. The engine's thread calls `emit`, which waits only for the socket.
    """

    def __init__(
        self, listener: FrameListener, card: ModelCard, draft_stats: Callable[[], dict[str, DraftChannelStats]]
    ) -> None:
        self._listener = listener
        self._card = card
        self._draft_stats = draft_stats
        self._connection: FrameConnection[ShellToTarget] | None = None
        self._is_closing = threading.Event()

    def run(self, loop: EngineLoop) -> None:
        """Accept and serve shells until `close`."""
        while not self._is_closing.is_set():
            connection = self._listener.accept(ShellToTarget, _POLL_S)
            if connection is not None:
                self._serve(connection, loop)
        self._listener.close()

    def emit(self, message: StepOutput | Refused | Status | Snapshot) -> None:
        """Send to the shell, or drop the message if no shell is connected."""
        connection = self._connection
        if connection is None:
            return
        try:
            connection.send(message, _SEND_TIMEOUT_S)
        except ConnectionLostError:
            connection.close()  # the receiving thread notices and aborts the requests

    def close(self) -> None:
        """Make `run` return within half a second."""
        self._is_closing.set()

    def _serve(self, connection: FrameConnection[ShellToTarget], loop: EngineLoop) -> None:
        try:
            connection.send(TargetReady(self._card), _SEND_TIMEOUT_S)
            self._connection = connection
            while not self._is_closing.is_set():
                for message in connection.receive(_POLL_S):
                    self._handle(message, connection, loop)
        except ConnectionLostError as error:
            logger.info("shell left: %s", error)
        finally:
            self._connection = None
            connection.close()
            loop.submit(AbortAll())

    def _handle(self, message: ShellToTarget, connection: FrameConnection[ShellToTarget], loop: EngineLoop) -> None:
        if isinstance(message, Ping):
            connection.send(Pong(loop.stalled_s, loop.stats, self._draft_stats()), _SEND_TIMEOUT_S)
        else:
            loop.submit(message)

"""The process that owns the draft model. Its death costs speed, never a token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from actors.actor_thread import ActorThread
from actors.draft_server import DraftServer
from actors.frames import FrameListener
from actors.process_logging import configure_logging
from actors.settings import PairSettings
from actors.target import DRAFT_SOCKET

logger = logging.getLogger(__name__)


class DraftActor:
    """Loads the draft in the background and answers the target over `folder / DRAFT_SOCKET`."""

    def __init__(self, settings: PairSettings, folder: Path) -> None:
        configure_logging()
        self._settings = settings
        self._folder = folder
        self._server: DraftServer | None = None
        self._thread = ActorThread("DraftActor", self._serve)

    def ready(self) -> None:
        """Returns when the model is loaded and the socket listens. Raises ConfigError for what cannot be served."""
        self._thread.wait_ready(self._settings.start_timeout_s)

    def close(self) -> None:
        """Stop after the current round."""
        if self._server is not None:
            self._server.close()
        self._thread.join(timeout_s=self._settings.pong_timeout_s)

    def _serve(self, is_ready: Callable[[], None]) -> None:
        from engine.proposer.model import ModelProposer

        proposer = ModelProposer(self._settings)
        self._server = DraftServer(FrameListener(self._folder / DRAFT_SOCKET), proposer, proposer.model_version)
        is_ready()
        self._server.run()

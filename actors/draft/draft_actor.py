"""The actor that owns the draft model. Its death costs speed, never a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.process.actor_thread import ActorThread
from actors.process.process_logging import configure_logging
from actors.settings import PairSettings


class DraftActor:
    """Loads the draft in the background and answers the target over a socket in `folder`."""

    def __init__(self, settings: PairSettings, folder: Path) -> None:
        configure_logging()
        self._settings = settings
        self._folder = folder
        self._thread = ActorThread("DraftActor", self._serve)

    def ready(self) -> None:
        """Returns when the model is loaded and the socket listens. Raises ConfigError for what cannot be served."""
        self._thread.wait_ready(self._settings.start_timeout_s)

    def _serve(self, is_ready: Callable[[], None]) -> None:
        # Here and not above: this class is known to shells and to Serve's builder, which must not load torch for it.
        from actors.draft.draft_process import serve_draft

        serve_draft(self._settings, self._folder, is_ready)

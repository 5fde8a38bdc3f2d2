"""The actor that owns the draft model. Its death costs speed, never a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.draft.draft_choice import DraftStart, read_choice, with_draft_at
from actors.process.actor_thread import ActorThread
from actors.process.process_logging import configure_logging
from actors.process.quick_imports import quick_imports
from actors.settings import PairSettings
from protos.errors import ServingError
from protos.fingerprint import digest


class DraftActor:
    """Loads the draft in the background and serves the target over a socket in `folder`.

    The draft is the latest choice in `folder` (`actors.draft.draft_choice`), or else the settings' draft.
    """

    def __init__(self, settings: PairSettings, folder: Path) -> None:
        configure_logging()
        choice = read_choice(folder)
        self._generation = 0 if choice is None else choice.generation
        self._settings = settings if choice is None else with_draft_at(settings, choice.path)
        self._folder = folder
        self._thread = ActorThread("DraftActor", self._serve, settings.niceness)

    def ready(self) -> None:
        """Return when the model is loaded and the socket listens. Raises ConfigError if it cannot be served."""
        self._thread.wait_ready(self._settings.start_timeout_s)

    def start(self) -> DraftStart:
        """Wait for the outcome of this process's start, and return it."""
        try:
            self.ready()
        except ServingError as error:
            return DraftStart(self._generation, "", error.message)
        return DraftStart(self._generation, self._digest())

    def _serve(self, is_ready: Callable[[], None]) -> None:
        # Imported here: shells and Serve's builder import this class, and must not load torch for it.
        with quick_imports():
            from actors.draft.draft_process import serve_draft

        serve_draft(self._settings, self._folder, is_ready)

    def _digest(self) -> str:
        from engine.model.loader import model_version  # loads torch, as above

        model = self._settings.draft.model
        assert model is not None, "it is loaded"
        return digest(str(self._settings.draft.kind), model_version(model.path))

"""The actor that owns the draft model. Its death costs speed, never a token."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from actors.process import configure_logging
from actors.process.actor_thread import ActorThread, quick_imports
from actors.settings import PairSettings
from protos.errors import ServingError
from protos.served_model import digest

_FILE = "draft.json"


class DraftChoice(msgspec.Struct, frozen=True):
    """A folder with a checkpoint; `generation` counts the choices of a draft process, from 1.

    A target drafts with the head `tried`, and goes back to the one at `path` if it dies.
    """

    path: str
    generation: int = 0
    tried: str = ""


class DraftStart(msgspec.Struct, frozen=True):
    """The outcome of a draft process's start: the choice it has loaded, or its `failure`.

    `digest` is the draft's part of the deployment's fingerprint. `generation` 0 is the draft of the settings.
    """

    generation: int
    digest: str
    failure: str | None = None


def write_choice(folder: Path, choice: DraftChoice) -> None:
    """Make the next start of the process in `folder` load `choice`. The write is atomic."""
    file = folder / f"{_FILE}.new"
    file.write_bytes(msgspec.json.encode(choice))
    os.replace(file, folder / _FILE)


def read_choice(folder: Path) -> DraftChoice | None:
    """Return the latest choice; None if the settings' draft was never replaced."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=DraftChoice)
    except FileNotFoundError:
        return None


class DraftActor:
    """Loads the draft in the background and serves the target over a socket in `folder`.

    The draft is the latest choice in `folder` (`actors.draft.draft_actor`), or else the settings' draft.
    """

    def __init__(self, settings: PairSettings, folder: Path) -> None:
        configure_logging()
        choice = read_choice(folder)
        self._generation = 0 if choice is None else choice.generation
        self._settings = settings if choice is None else settings.with_draft_at(choice.path)
        self._folder = folder
        self._thread = ActorThread("DraftActor", self._serve)

    def ready(self) -> None:
        """Return when the model is loaded and the socket listens. Raises ConfigError if it cannot be served."""
        self._thread.wait_ready()

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

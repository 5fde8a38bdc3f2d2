"""The checkpoint that a pair's draft process loads when it starts: the settings' draft, or a later choice."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec

from actors.settings import PairSettings

_FILE = "draft.json"


class DraftChoice(msgspec.Struct, frozen=True):
    """A folder with a checkpoint; `generation` counts the choices of a pair, from 1."""

    path: str
    generation: int


class DraftStart(msgspec.Struct, frozen=True):
    """The outcome of a draft process's start: the choice it has loaded, or its `failure`.

    `digest` is the draft's part of the deployment's fingerprint. `generation` 0 is the draft of the settings.
    """

    generation: int
    digest: str
    failure: str | None = None


def write_choice(folder: Path, choice: DraftChoice) -> None:
    """Make the next start of the draft process in `folder` load `choice`. The write is atomic."""
    file = folder / f"{_FILE}.new"
    file.write_bytes(msgspec.json.encode(choice))
    os.replace(file, folder / _FILE)


def read_choice(folder: Path) -> DraftChoice | None:
    """Return the latest choice; None if the settings' draft was never replaced."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=DraftChoice)
    except FileNotFoundError:
        return None


def with_draft_at(settings: PairSettings, path: str) -> PairSettings:
    """Return the settings with the draft model at `path`."""
    model = settings.draft.model
    assert model is not None, "the pair has a draft model"
    return replace(settings, draft=replace(settings.draft, model=replace(model, path=path)))

"""Checks a checkpoint that is to replace a running draft, while the old draft still serves."""

from __future__ import annotations

import socket
from pathlib import Path

from actors.settings import PairSettings
from engine.model.checkpoint.finiteness import refuse_not_finite
from protos.errors import ConfigError, RequestError


def check_candidate(settings: PairSettings, path: str) -> None:
    """Check that the checkpoint at `path` can be the draft of a pair with these settings.

    The check covers files, weight values, vocabulary and memory. On a CPU the draft is loaded whole.

    Raises:
        RequestError: it cannot; the message has the reason.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise RequestError(
            f"The draft {path!r} has no config.json on node {socket.gethostname()}; give the absolute path of a "
            "checkpoint folder that exists on every node with a pair.",
            param="path",
        )
    try:
        refuse_not_finite(folder)
        # Imported here: it takes seconds, and the check of the files does not need it.
        from actors.draft.candidate_load import refuse_other_vocabulary, refuse_unloadable

        refuse_other_vocabulary(settings, path)
        refuse_unloadable(settings, path)
    except ConfigError as error:
        raise RequestError(f"The draft {path!r} is refused: {error.message}.", param="path") from None

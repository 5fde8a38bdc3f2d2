"""The check of a checkpoint that shall take a running draft's place, made while that one still drafts."""

from __future__ import annotations

import socket
from pathlib import Path

from actors.settings import PairSettings
from engine.model.checkpoint.finiteness import refuse_not_finite
from protos.errors import ConfigError, RequestError


def check_candidate(settings: PairSettings, path: str) -> None:
    """Return if the draft of a pair with these settings could be the checkpoint at `path`.

    Its files, its weights' values, its vocabulary and its memory are judged; a draft on the processor is loaded whole.

    Raises:
        RequestError: it could not; the message has the reason.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise RequestError(
            f"The draft {path!r} has no config.json on node {socket.gethostname()}; give the absolute path of a "
            "checkpoint's folder that every node with a pair has.",
            param="path",
        )
    try:
        refuse_not_finite(folder)
        # Here and not above: it takes seconds to import, and spoilt files are refused without.
        from actors.draft.candidate_load import refuse_other_vocabulary, refuse_unloadable

        refuse_other_vocabulary(settings, path)
        refuse_unloadable(settings, path)
    except ConfigError as error:
        raise RequestError(f"The draft {path!r} is refused: {error.message}.", param="path") from None

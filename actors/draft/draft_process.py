"""The process of a `DraftActor`: the draft model, and its end of the channel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.channel.draft_messages import DRAFT_SOCKET
from actors.draft.draft_server import DraftServer
from actors.draft_loader import load_draft
from actors.process.frames import FrameListener
from actors.settings import PairSettings


def serve_draft(settings: PairSettings, folder: Path, is_ready: Callable[[], None]) -> None:
    """Load the draft, call `is_ready` once the target can connect, and draft until the process is killed.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the target.
    """
    drafter = load_draft(settings)
    proposer = drafter.proposer
    server = DraftServer(
        FrameListener(folder / DRAFT_SOCKET),
        proposer,
        proposer.model_version,
        drafter.ahead,
        settings.engine.speculation.tree,
        lambda: proposer.counts,
    )
    is_ready()
    server.run()

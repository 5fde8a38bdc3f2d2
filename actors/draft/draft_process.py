"""The process of a `DraftActor`: the draft model, and its end of the channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from actors.channel.draft_messages import DRAFT_SOCKET
from actors.draft.draft_server import DraftServer
from actors.process.actor_thread import without_compiler
from actors.process.frames import FrameListener
from actors.settings import PairSettings
from engine.model.cuda_graphs.buckets import sized
from engine.proposer.draft_model.ahead_drafter import AheadDrafter
from engine.proposer.draft_model.loader import TextProposer, load_drafter
from engine.proposer.draft_model.model_proposer import ModelProposer


@without_compiler()
def load_draft(settings: PairSettings) -> tuple[ModelProposer | TextProposer, AheadDrafter | None]:
    """Load the draft model of a pair that has one, and its drafter ahead of verification where it is used.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the target.
    """
    engine, draft = settings.engine, settings.draft
    assert draft.model is not None, "the pair has a draft model"
    assert draft.cache is not None, "a draft model has a pool"
    # The draft prefills four times the target's tokens per step, and still ends sooner.
    limits = replace(engine.scheduler, max_tokens_per_step=4 * engine.scheduler.max_tokens_per_step)
    return load_drafter(
        replace(draft.model, graphs=sized(draft.model.graphs, limits, engine.speculation)),
        draft.cache,
        limits,
        engine.model.path,
        engine.speculation.tree,
        is_ahead=draft.is_ahead,
    )


def serve_draft(settings: PairSettings, folder: Path, is_ready: Callable[[], None]) -> None:
    """Load the draft, call `is_ready` once the target can connect, and draft until the process is killed.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the target.
    """
    proposer, ahead = load_draft(settings)
    server = DraftServer(
        FrameListener(folder / DRAFT_SOCKET),
        proposer,
        proposer.model_version,
        ahead,
        lambda: proposer.counts,
    )
    is_ready()
    server.run()

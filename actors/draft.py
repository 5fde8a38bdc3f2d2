"""The process that owns the draft model. Its death costs speed, never a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from actors.actor_thread import ActorThread
from actors.draft_server import DraftServer
from actors.frames import FrameListener
from actors.process_logging import configure_logging
from actors.settings import PairSettings
from actors.target import DRAFT_SOCKET
from engine.proposer.model import ModelProposer

_PROMPT_SHARE = 4  # a draft reads as many times the target's tokens per step, and is still done sooner


class DraftActor:
    """Loads the draft in the background and answers the target over `folder / DRAFT_SOCKET`."""

    def __init__(self, settings: PairSettings, folder: Path) -> None:
        configure_logging()
        self._settings = settings
        self._folder = folder
        self._thread = ActorThread("DraftActor", self._serve)

    def ready(self) -> None:
        """Returns when the model is loaded and the socket listens. Raises ConfigError for what cannot be served."""
        self._thread.wait_ready(self._settings.start_timeout_s)

    def _serve(self, is_ready: Callable[[], None]) -> None:
        proposer = self._proposer()
        server = DraftServer(FrameListener(self._folder / DRAFT_SOCKET), proposer, proposer.model_version)
        is_ready()
        server.run()

    def _proposer(self) -> ModelProposer:
        engine, draft = self._settings.engine, self._settings.draft
        assert draft.model is not None, "a pair without a draft model starts no DraftActor"
        assert draft.cache is not None, "and a draft model has a pool"
        limits = replace(engine.scheduler, max_tokens_per_step=_PROMPT_SHARE * engine.scheduler.max_tokens_per_step)
        return ModelProposer.from_config(draft.model, draft.cache, limits, _vocab_size(engine.model.path))


def _vocab_size(path: str) -> int:
    """Columns of the target's logits, from its configuration alone."""
    return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)

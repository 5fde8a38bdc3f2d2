"""The process that owns the target model, its KV and the truth."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from actors.actor_thread import ActorThread
from actors.draft_channel import ChannelProposer
from actors.engine_loop import EngineLoop
from actors.frames import FrameListener
from actors.process_logging import configure_logging
from actors.settings import DraftKind, PairSettings
from actors.shell_messages import DraftChannelStats
from actors.shell_server import ShellServer
from engine.engine_core import EngineCore
from engine.model_runner import ModelRunner
from engine.proposer import Proposer
from engine.proposer.ngram import NgramProposer
from protos.messages import ModelCard

logger = logging.getLogger(__name__)

TARGET_SOCKET = "target.sock"
DRAFT_SOCKET = "draft.sock"


class TargetActor:
    """Loads the target in the background and serves the pair's shell over `folder / TARGET_SOCKET`.

    Ray restarts it after a death with nothing but its settings: requests are lost to it, and found again by the
    ingress, which holds their committed tokens.
    """

    def __init__(self, settings: PairSettings, folder: Path) -> None:
        configure_logging()
        self._settings = settings
        self._folder = folder
        self._thread = ActorThread("TargetActor", self._serve)

    def ready(self) -> None:
        """Returns when the model is loaded and the socket listens. Raises ConfigError for what cannot be served."""
        self._thread.wait_ready(self._settings.start_timeout_s)

    def _serve(self, is_ready: Callable[[], None]) -> None:
        channel = self._channel()
        core = EngineCore.from_config(self._settings.engine, channel or self._local_proposer())
        listener = FrameListener(self._folder / TARGET_SOCKET)
        server = ShellServer(listener, self._card(core), _stats_of(channel))
        loop = EngineLoop(core, server.emit, channel.flush if channel else lambda: None)
        threading.Thread(target=server.run, args=(loop,), name="shell-server", daemon=True).start()
        is_ready()
        loop.run()

    def _channel(self) -> ChannelProposer | None:
        if self._settings.draft.kind is not DraftKind.MODEL:
            return None
        return ChannelProposer(self._folder / DRAFT_SOCKET, fallback=NgramProposer())

    def _local_proposer(self) -> Proposer | None:
        return NgramProposer() if self._settings.draft.kind is DraftKind.NGRAM else None

    def _card(self, core: EngineCore) -> ModelCard:
        runner = core.runner
        assert isinstance(runner, ModelRunner), "from_config loads one"
        is_drafting = self._settings.draft.kind is not DraftKind.NONE
        return ModelCard(
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            model_version=runner.model_version,
            block_size=runner.block_size,
            max_draft_tokens=self._settings.engine.speculation.num_tokens if is_drafting else 0,
        )


def _stats_of(channel: ChannelProposer | None) -> Callable[[], DraftChannelStats]:
    return (lambda: channel.stats) if channel else DraftChannelStats

"""What runs inside a `TargetActor`: the target model, its engine, and the two sockets to shell and draft."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from actors.draft_channel import ChannelProposer
from actors.draft_messages import DRAFT_SOCKET
from actors.engine_loop import EngineLoop
from actors.frames import FrameListener
from actors.settings import DraftKind, PairSettings
from actors.shell_messages import TARGET_SOCKET, DraftChannelStats
from actors.shell_server import ShellServer
from engine.engine_core import EngineCore
from engine.model_runner import ModelRunner
from engine.proposer import Proposer
from engine.proposer.ngram import NgramProposer
from engine.proposer.suffix import SuffixProposer
from protos.messages import ModelCard


def serve_target(settings: PairSettings, folder: Path, is_ready: Callable[[], None]) -> None:
    """Load the target, call `is_ready` once the shell can connect, and compute until the process is killed.

    Raises:
        ConfigError: the model, the pool or the limits cannot be had.
    """
    channel = _channel(settings, folder)
    core = EngineCore.from_config(settings.engine, channel or _local_proposer(settings))
    server = ShellServer(FrameListener(folder / TARGET_SOCKET), _card(core, settings), _stats_of(channel))
    loop = EngineLoop(core, server.emit, channel.flush if channel else lambda: None)
    threading.Thread(target=server.run, args=(loop,), name="shell-server", daemon=True).start()
    is_ready()
    loop.run()


def _channel(settings: PairSettings, folder: Path) -> ChannelProposer | None:
    if settings.draft.kind is not DraftKind.MODEL:
        return None
    return ChannelProposer(folder / DRAFT_SOCKET, fallback=NgramProposer())


def _local_proposer(settings: PairSettings) -> Proposer | None:
    match settings.draft.kind:
        case DraftKind.NGRAM:
            return NgramProposer()
        case DraftKind.SUFFIX:
            return SuffixProposer()
        case _:
            return None


def _stats_of(channel: ChannelProposer | None) -> Callable[[], DraftChannelStats]:
    return (lambda: channel.stats) if channel else DraftChannelStats


def _card(core: EngineCore, settings: PairSettings) -> ModelCard:
    runner = core.runner
    assert isinstance(runner, ModelRunner), "from_config loads one"
    is_drafting = settings.draft.kind is not DraftKind.NONE
    return ModelCard(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        model_version=runner.model_version,
        block_size=runner.block_size,
        max_draft_tokens=settings.engine.speculation.max_num_tokens if is_drafting else 0,
    )

"""What runs inside a `DraftActor`: the draft model behind its end of the channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from actors.draft_messages import DRAFT_SOCKET
from actors.draft_server import DraftServer
from actors.frames import FrameListener
from actors.settings import PairSettings
from engine.proposer.model import ModelProposer

_PROMPT_SHARE = 4  # a draft reads as many times the target's tokens per step, and is still done sooner


def serve_draft(settings: PairSettings, folder: Path, is_ready: Callable[[], None]) -> None:
    """Load the draft, call `is_ready` once the target can connect, and draft until the process is killed.

    Raises:
        ConfigError: the model cannot be had, or does not fit the target.
    """
    proposer = _proposer(settings)
    fan_out = settings.draft.fan_out
    lookahead = None if fan_out is None else proposer.lookahead(fan_out)
    tree = settings.engine.speculation.tree
    server = DraftServer(FrameListener(folder / DRAFT_SOCKET), proposer, proposer.model_version, lookahead, tree)
    is_ready()
    server.run()


def _proposer(settings: PairSettings) -> ModelProposer:
    engine, draft = settings.engine, settings.draft
    assert draft.model is not None, "a pair without a draft model starts no DraftActor"
    assert draft.cache is not None, "and a draft model has a pool"
    limits = replace(engine.scheduler, max_tokens_per_step=_PROMPT_SHARE * engine.scheduler.max_tokens_per_step)
    vocab_size = _vocab_size(engine.model.path)
    return ModelProposer.from_config(draft.model, draft.cache, limits, vocab_size, engine.speculation.tree)


def _vocab_size(path: str) -> int:
    """Columns of the target's logits, from its configuration alone."""
    return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)

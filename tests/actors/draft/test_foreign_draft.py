"""A draft process with another tokenizer, over a real socket: the channel carries the target's ids alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from actors.draft.draft_server import DraftServer
from actors.process.frames import FrameListener
from engine.config import CacheConfig, ModelConfig, SchedulerConfig
from engine.proposer.draft_model.loader import load_drafter
from tests.actors.draft.test_disciplines import connected, generate, new_engine, requests
from tests.engine.fixtures.checkpoints import Folders
from tests.engine.fixtures.pairs.foreign_pair import COVERAGE, write_foreign_pair

CACHE = CacheConfig(num_blocks=256, memory_bytes=None)


@contextmanager
def serving(folders: Folders, path: Path, *, is_ahead: bool) -> Iterator[None]:
    """A draft process, as a thread."""
    model = ModelConfig(str(folders.draft), dtype="float32")
    proposer, ahead = load_drafter(model, CACHE, SchedulerConfig(), str(folders.target), is_ahead=is_ahead)
    listener = FrameListener(path)
    server = DraftServer(listener, proposer, proposer.model_version, ahead, counts=lambda: proposer.counts)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.close()
        thread.join(10.0)
        listener.close()
        assert not thread.is_alive()


@pytest.mark.usefixtures("patient_target")
@pytest.mark.parametrize(("is_text", "is_ahead"), [(False, False), (False, True), (True, False)])
def test_a_pair_with_two_tokenizers_says_what_the_target_alone_says(
    tmp_path: Path, folder: Path, is_text: bool, is_ahead: bool
) -> None:
    folders = write_foreign_pair(tmp_path)
    reference = generate(new_engine(folders, None), requests())
    with patch(COVERAGE, 1.1 if is_text else 0.0), serving(folders, folder / "draft.sock", is_ahead=is_ahead):
        channel = connected(folder / "draft.sock")
        engine = new_engine(folders, channel)
        assert generate(engine, requests(), channel) == reference
        drafts, translated = engine.stats().drafts, channel.stats.translated
        channel._link._disconnect()
    assert drafts.num_accepted_tokens > 0
    assert drafts.num_invalid_tokens == 0
    assert translated.num_tokens > 0
    assert is_text or 0 < translated.num_lost < translated.num_tokens

"""A draft process with another tokenizer, over a real socket: the channel carries the target's ids alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.draft.draft_server import DraftServer
from actors.process.frames import FrameListener
from engine.config import CacheConfig, DraftVocabulary, ModelConfig, SchedulerConfig
from engine.proposer.draft_model.loader import load_drafter
from tests.actors.channel.test_disciplines import connected, generate, new_engine, requests
from tests.engine.fixtures.checkpoints import Folders
from tests.engine.fixtures.foreign_pair import write_foreign_pair

CACHE = CacheConfig(num_blocks=256, memory_bytes=None)


@contextmanager
def serving(folders: Folders, path: Path, vocabulary: DraftVocabulary, *, is_ahead: bool) -> Iterator[None]:
    """A draft process, as a thread."""
    model = ModelConfig(str(folders.draft), dtype="float32")
    drafter = load_drafter(model, CACHE, SchedulerConfig(), str(folders.target), vocabulary, is_ahead=is_ahead)
    proposer = drafter.proposer
    listener = FrameListener(path)
    server = DraftServer(listener, proposer, proposer.model_version, drafter.ahead, counts=lambda: proposer.counts)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.close()
        thread.join(10.0)
        listener.close()
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("vocabulary", "is_ahead"),
    [(DraftVocabulary.INTERSECTION, False), (DraftVocabulary.INTERSECTION, True), (DraftVocabulary.TEXT, False)],
)
def test_a_pair_with_two_tokenizers_says_what_the_target_alone_says(
    tmp_path: Path, folder: Path, vocabulary: DraftVocabulary, is_ahead: bool
) -> None:
    folders = write_foreign_pair(tmp_path)
    reference = generate(new_engine(folders, None), requests())
    with serving(folders, folder / "draft.sock", vocabulary, is_ahead=is_ahead):
        channel = connected(folder / "draft.sock")
        engine = new_engine(folders, channel)
        assert generate(engine, requests(), channel) == reference
        drafts, translated = engine.stats().drafts, channel.stats.translated
        channel.disconnect()
    assert drafts.num_accepted_tokens > 0
    assert drafts.num_invalid_tokens == 0
    assert translated.num_tokens > 0
    assert vocabulary is DraftVocabulary.TEXT or 0 < translated.num_lost < translated.num_tokens

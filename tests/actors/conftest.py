"""Sequences, alone and scheduled, for tests of the processes around the engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.process.socket_folder import private_folder
from engine.sequence.batch import ScheduledSequence
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest, SamplingParams, VerifyMode


@pytest.fixture
def folder() -> Iterator[Path]:
    path = private_folder()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()

"""Sequences, alone and scheduled, for tests of the processes around the engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.process.socket_folder import private_folder
from engine.sequence.batch import ScheduledSequence
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest, SamplingParams, VerifyMode


def make_sequence(request_id: str = "a", prompt: tuple[int, ...] = (1, 2, 3), num_drafts: int = 4) -> Sequence:
    request = GenerateRequest(request_id, prompt, SamplingParams(seed=5, max_tokens=100))
    return Sequence(request, num_draft_tokens=num_drafts, verify=VerifyMode.COUPLED, arrival_s=0.0)


def make_scheduled(sequence: Sequence, num_drafts: int = 4) -> ScheduledSequence:
    return ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, num_drafts)


@pytest.fixture
def sequence() -> Sequence:
    return make_sequence()


@pytest.fixture
def new_sequence() -> Callable[..., Sequence]:
    return make_sequence


@pytest.fixture
def new_scheduled() -> Callable[..., ScheduledSequence]:
    return make_scheduled


@pytest.fixture
def folder() -> Iterator[Path]:
    path = private_folder()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()

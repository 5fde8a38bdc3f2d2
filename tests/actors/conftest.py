"""Folders for the sockets of the processes around the engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.process.frames import private_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    path = private_folder()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()

"""Sockets lie where only their owner may enter, and do not outlive him for long."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from actors.process.socket_folder import private_folder


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_socket_folder_is_open_to_its_owner_only():
    assert stat.S_IMODE(private_folder().stat().st_mode) == 0o700


def test_folders_of_killed_processes_are_removed(tmp_path: Path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, living, other = (
        tmp_path / f"outrider-{dead.pid}-abc",
        tmp_path / f"outrider-{os.getppid()}-abc",
        tmp_path / "outrider-notes-abc",
    )
    for folder in (left, living, other):
        folder.mkdir()
    private_folder()
    assert [folder.exists() for folder in (left, living, other)] == [False, True, True]

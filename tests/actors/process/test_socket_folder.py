"""Sockets lie where only their owner may enter, and do not outlive him for long."""

import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from actors.draft.draft_link import DRAFT_SOCKET
from actors.process.frames import private_folder

MAKE = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from actors.process.frames import private_folder
print(private_folder(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_socket_folder_is_open_to_its_owner_only():
    assert stat.S_IMODE(private_folder().stat().st_mode) == 0o700


def test_folders_of_killed_processes_are_removed_and_of_living_ones_kept(tmp_path: Path):
    """A living one of another container has an id that means nothing here."""
    command = [sys.executable, "-c", MAKE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        own, other = private_folder(), tmp_path / "outrider-notes-abc"
        other.mkdir()
        assert left.exists(), "its process lives"
        process.kill()
        process.wait()
        private_folder()
        assert [folder.exists() for folder in (left, own, other)] == [False, True, True]


def test_a_long_folder_for_temporary_files_leaves_room_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long = tmp_path / ("a" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = private_folder()
    try:
        (folder / "a-draft-with-a-long-name").mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "a-draft-with-a-long-name" / DRAFT_SOCKET))
    finally:
        shutil.rmtree(folder)

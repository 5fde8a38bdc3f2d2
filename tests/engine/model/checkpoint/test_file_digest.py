"""A model's version distinguishes weights that differ in one byte. A large file is read for it once."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from engine.model.checkpoint import weight_files as module
from engine.model.checkpoint.weight_files import file_digest
from engine.model.loader import model_version

CONTENTS = bytes(300_000)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file is large, and has not changed for a while."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_LARGE_BYTES", 1)
    monkeypatch.setattr(time, "time_ns", lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) + 3_000_000_000)
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read."""
    read, found = module._read, []

    def noted(file: Path) -> str:
        found.append(file)
        return read(file)

    monkeypatch.setattr(module, "_read", noted)
    return found


def folder_of(parent: Path, contents: bytes) -> Path:
    parent.mkdir()
    (parent / "config.json").write_text("{}")
    (parent / "model.safetensors").write_bytes(contents)
    return parent


def test_one_byte_makes_another_version(tmp_path: Path) -> None:
    changed = bytearray(CONTENTS)
    changed[199_999] = 1
    folders = {"a": CONTENTS, "b": CONTENTS, "c": bytes(changed)}
    first, same, other = (model_version(str(folder_of(tmp_path / name, each))) for name, each in folders.items())
    assert first == same != other


def test_a_thread_reads_ahead_what_the_version_needs(tmp_path: Path, reads: list[Path]) -> None:
    folder = folder_of(tmp_path / "a", CONTENTS)
    module.begin_digests(str(folder))
    model_version(str(folder))  # waits for the thread, or the thread for it
    for thread in threading.enumerate():
        if thread.name == "digests":
            thread.join(10)
    assert reads == [folder / "model.safetensors"]
    module.begin_digests(str(tmp_path / "no folder"))


def test_a_large_file_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    file = folder_of(tmp_path / "a", CONTENTS) / "model.safetensors"
    link = tmp_path / "link"
    link.symlink_to(file)
    assert {file_digest(each) for each in (file, file, link)} == {hashlib.sha256(CONTENTS).hexdigest()}
    assert reads == [file]


def test_new_contents_of_the_same_size_and_date_are_read(tmp_path: Path, reads: list[Path]) -> None:
    file = folder_of(tmp_path / "a", CONTENTS) / "model.safetensors"
    before, stat = file_digest(file), file.stat()
    file.write_bytes(CONTENTS[:-1] + b"x")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert file_digest(file) != before
    assert reads == [file, file]


def test_a_file_of_the_hub_s_cache_is_named_by_its_digest(tmp_path: Path, reads: list[Path]) -> None:
    blob = tmp_path / "blobs" / hashlib.sha256(CONTENTS).hexdigest()
    blob.parent.mkdir()
    blob.write_bytes(CONTENTS)
    file = tmp_path / "model.safetensors"
    file.symlink_to(blob)
    assert file_digest(file) == blob.name
    assert not reads


def test_a_file_that_has_just_changed_is_read_again(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again within the tick of its times."""
    file = folder_of(tmp_path / "a", CONTENTS) / "model.safetensors"
    with monkeypatch.context() as present:
        present.setattr(time, "time_ns", lambda: time.clock_gettime_ns(time.CLOCK_REALTIME))
        assert file_digest(file) == file_digest(file)
    assert reads == [file, file]
    assert file_digest(file) == file_digest(file)
    assert reads == [file, file, file]


def test_a_file_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder_of(tmp_path / "a", CONTENTS) / "model.safetensors"
    read = module._read

    def changed_meanwhile(path: Path) -> str:
        digest = read(path)
        path.write_bytes(CONTENTS[:-1] + b"x")
        return digest

    with monkeypatch.context() as present:
        present.setattr(module, "_read", changed_meanwhile)
        before = file_digest(file)
    assert file_digest(file) != before


def test_old_notes_leave(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NOTES", 2)
    files = [folder_of(tmp_path / name, CONTENTS) / "model.safetensors" for name in "abc"]
    for age_s, file in zip((9, 7), files, strict=False):
        file_digest(file)
        note = max((cache / "outrider" / "digests").iterdir(), key=lambda each: each.stat().st_mtime_ns)
        os.utime(note, (1e9 - age_s, 1e9 - age_s))
    file_digest(files[2])
    kept = {int(note.name.split("-")[1]) for note in (cache / "outrider" / "digests").iterdir()}
    assert kept == {file.stat().st_ino for file in files[1:]}


@pytest.mark.parametrize("broken", ["", "0123456789", "no digest " * 7, "0" * 65])
def test_a_broken_note_is_rewritten(tmp_path: Path, cache: Path, reads: list[Path], broken: str) -> None:
    file = folder_of(tmp_path / "a", CONTENTS) / "model.safetensors"
    digest = file_digest(file)
    [note] = (cache / "outrider" / "digests").iterdir()
    note.write_text(broken)
    assert file_digest(file) == file_digest(file) == digest
    assert note.read_text() == digest
    assert len(reads) == 2


def test_without_a_cache_folder_files_are_read(tmp_path: Path, cache: Path, reads: list[Path]) -> None:
    file = folder_of(tmp_path / "a", CONTENTS) / "model.safetensors"
    cache.write_text("no folder")
    assert file_digest(file) == file_digest(file)
    assert len(reads) == 2

"""`outrider cache` lists packed weights and converted files, and clears them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from cluster.cli.__main__ import main


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of two packed models, a conversion and a digest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OUTRIDER_CACHE_GIB", "2")
    root = tmp_path / "outrider"
    for name, model in (("a1", "org/small"), ("b2", "org/large")):
        folder = root / "packed" / name
        folder.mkdir(parents=True)
        (folder / "about.json").write_text(f'{{"model": "{model}", "quantization": "int4"}}')
        (folder / "weights").write_bytes(bytes(3_000_000))
    converted = root / "models" / "file-1234-float32-2"
    converted.mkdir(parents=True)
    (converted / "config.json").write_bytes(bytes(2_000_000))
    (root / "digests").mkdir()
    (root / "digests" / "1-2-3-4-5").write_text("0" * 64)
    return root


def test_entries_are_listed_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    said = capsys.readouterr().out
    assert "org/small  int4  3.0 MB  used 20" in said
    assert "file-1234-float32-2  converted GGUF  2.0 MB  used 20" in said
    assert "digests  of checkpoints  0.0 MB  used 20" in said
    assert "4 entries, 8.0 MB; packed weights take at most 2.1 GB (OUTRIDER_CACHE_GIB)" in said


def test_a_model_is_cleared_by_its_name(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "org/small"]) == 0
    assert "removed 1 entries, 3.0 MB" in capsys.readouterr().out
    assert [folder.name for folder in (root / "packed").iterdir()] == ["b2"]
    assert (root / "models" / "file-1234-float32-2").is_dir()


def test_all_is_cleared_without_a_name(root: Path) -> None:
    assert main(["cache", "clear"]) == 0
    assert not [*(root / "packed").iterdir(), *(root / "models").iterdir()]
    assert not (root / "digests").exists()


def test_digests_are_cleared_by_their_name(root: Path) -> None:
    assert main(["cache", "clear", "digests"]) == 0
    assert {folder.name for folder in root.iterdir()} == {"packed", "models"}


def test_an_unknown_name_is_refused_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "org/none"]) == 1
    assert (
        "no entry of 'org/none'; it has digests, file-1234-float32-2, org/large, org/small" in capsys.readouterr().err
    )


def test_a_bound_that_is_no_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_GIB", "much")
    assert main(["cache"]) == 1
    assert "OUTRIDER_CACHE_GIB is 'much'; set it to" in capsys.readouterr().err


def test_what_this_user_cannot_remove_is_not_called_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, remove = root / "packed" / "b2", shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **options: None if folder == kept else remove(folder))
    assert main(["cache", "clear"]) == 1
    said = capsys.readouterr()
    assert "removed 3 entries, 5.0 MB" in said.out
    assert f"1 entries cannot be removed by this user, among them {kept}" in said.err


def test_a_folder_that_cannot_be_read_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Path) -> list[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert main(["cache"]) == 1
    assert capsys.readouterr().err == f"\nerror: [Errno 13] Permission denied: '{root / 'packed'}'\n"


@pytest.mark.parametrize("place", [None, "relative"])
def test_a_cache_is_in_the_home_folder_unless_a_whole_path_says_otherwise(
    place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME") if place is None else monkeypatch.setenv("XDG_CACHE_HOME", place)
    assert main(["cache"]) == 0
    assert f"in {tmp_path}/.cache/outrider/packed" in capsys.readouterr().out


def test_a_user_without_a_home_folder_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id without an entry in passwd
    assert main(["cache"]) == 1
    assert "no home folder for a cache; set XDG_CACHE_HOME" in capsys.readouterr().err


def test_an_empty_cache_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    assert main(["cache"]) == 0

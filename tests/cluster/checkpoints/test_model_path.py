"""The places where models are looked for."""

from pathlib import Path

import pytest

from cluster.checkpoints import resolve_model_path
from protos.errors import ConfigError


def test_a_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("m") == str(tmp_path / "m")


def test_a_hub_id_stays_as_it_is():
    assert resolve_model_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model_path(str(tmp_path))


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(file: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "is_file", refuse)  # permissions do not hold for root
    with pytest.raises(ConfigError, match=r"cannot be looked up.*Permission denied.*let this user read it"):
        resolve_model_path(str(tmp_path))


@pytest.mark.parametrize("path", ["/x" * 3000, "x" * 300, "~no-such-user/m"])
def test_a_path_that_cannot_be_is_refused(path: str):
    with pytest.raises(ConfigError, match=r"cannot be looked up.*give a path that exists"):
        resolve_model_path(path)


def test_a_path_that_is_nowhere_is_refused():
    with pytest.raises(ConfigError, match="neither a folder here"):
        resolve_model_path("models/nobody/target")

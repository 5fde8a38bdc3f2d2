"""A GGUF file in deploy.yaml is served from a folder that is made once, and refused before anything starts."""

import fcntl
import os
from pathlib import Path

import pytest

from cluster.checkpoints import convert_gguf_models
from cluster.cli.__main__ import main
from cluster.config import parse_config
from protos.errors import ConfigError
from tests.engine.model.checkpoint.gguf_files import GgufFile

DEPLOY = """
applications:
  - name: outrider
    route_prefix: /
    import_path: cluster.app:build
    args:
      model_id: tiny
      target: {{path: {path}, dtype: float32}}
      draft: {{kind: suffix}}
      cache: {{memory_gib: 0.01}}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outrider" / "models"


def deploy_file(path: Path) -> str:
    file = path.with_suffix(".yaml")
    file.write_text(DEPLOY.format(path=path))
    return str(file)


def test_it_is_converted_once_and_checked_as_a_folder(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = GgufFile(tmp_path / "tiny.gguf", template=None).write().path
    (cache / ".unfinished-left" / "model").mkdir(parents=True)  # of a process that was killed
    (cache / ".unfinished-running").mkdir()
    running = os.open(cache / ".unfinished-running", os.O_RDONLY)
    fcntl.flock(running, fcntl.LOCK_EX)
    assert main(["check", deploy_file(path)]) == 0
    os.close(running)
    (cache / ".unfinished-running").rmdir()
    said = capsys.readouterr().out
    assert f"converting {path} into {cache}" in said
    assert "note: 'tiny' has no chat template: chat requests get a 400." in said
    assert "is valid: model 'tiny'" in said
    (folder,) = cache.iterdir()
    assert main(["check", deploy_file(path)]) == 0
    assert "converting" not in capsys.readouterr().out
    config = parse_config(
        {"model_id": "m", "target": {"path": str(path), "dtype": "float32"}, "draft": {"kind": "none"}}
    )
    assert convert_gguf_models(config).target.path == str(folder)


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    converter = tmp_path / "converter"  # in the place of Python, which would import torch
    converter.write_text("#!/bin/sh\necho \"architecture 'rwkv7' of $3 is not read\"\nexit 1\n")
    converter.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(converter))
    path = GgufFile(tmp_path / "other.gguf").write().path
    assert main(["check", deploy_file(path)]) == 1
    assert f"architecture 'rwkv7' of {path} is not read" in capsys.readouterr().err
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_refused_with_its_remedy(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.mkdir(parents=True)
    cache.touch()  # in the place of the folder
    path = GgufFile(tmp_path / "tiny.gguf").write().path
    assert main(["check", deploy_file(path)]) == 1
    said = capsys.readouterr().err
    assert f"'{path}' cannot be converted: " in said
    assert f"'{cache}'; set XDG_CACHE_HOME to a folder that this user can write to" in said


def test_a_file_that_is_not_there_is_named() -> None:
    config = parse_config({"model_id": "m", "target": {"path": "no/such.gguf"}, "draft": {"kind": "none"}})
    with pytest.raises(ConfigError, match=r"GGUF file 'no/such.gguf' is neither here"):
        convert_gguf_models(config)


def test_a_folder_that_holds_one_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = GgufFile(tmp_path / "tiny.gguf").write().path
    assert main(["check", deploy_file(tmp_path)]) == 1
    assert f"has no config.json; give the file itself, '{path}'" in capsys.readouterr().err

"""Faults of a model's files are reported before a running pair makes room for it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.checkpoints import check_models
from cluster.config import parse_config
from cluster.replica_settings import ingress_config
from protos.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    save_file({"weight": np.zeros(64)}, tmp_path / "model.safetensors")
    return tmp_path


def check(target: Path, **others: object) -> None:
    check_models(parse_config({"model_id": "m", "target": {"path": str(target)}, **others}))


def test_whole_files_pass(folder: Path):
    check(folder, draft={"kind": "model", "path": str(folder)})


@pytest.mark.parametrize("num_bytes", [0, 4, 100, 500])
def test_a_file_that_is_cut_short_is_named(folder: Path, num_bytes: int):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match=r"model.safetensors' is not a whole safetensors file"):
        check(folder)


def test_a_draft_without_weights_is_named(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    draft = tmp_path_factory.mktemp("draft")
    (draft / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=f"{draft}' has no weights"):
        check(folder, draft={"kind": "model", "path": str(draft)})


def test_a_part_that_the_index_names_must_be_there(folder: Path):
    index = {"weight_map": {"weight": "model.safetensors", "other": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-2.safetensors' is not a whole"):
        check(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="not an index of weights"):
        check(folder)


def test_a_tokenizer_that_cannot_be_read_is_refused(folder: Path):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        check(folder)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for x in %}", "not valid Jinja, line 1"),
        ("no/such.jinja", "is no file; give the path of a template"),
        ("You are an assistant. " * 300, "is no file; give the path of a template"),
    ],
)
def test_an_operators_template_is_checked_before_anything_starts(folder: Path, template: str, said: str):
    with pytest.raises(ConfigError, match=said):
        check(folder, ingress={"chat_template": template})


def test_an_operators_template_is_a_file_or_a_text(folder: Path, tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    for written in (str(tmp_path / "mine.jinja"), "{{ messages }}"):
        config = parse_config({"model_id": "m", "target": {"path": str(folder)}, "ingress": {"chat_template": written}})
        assert check_models(config) == []
        assert ingress_config(config).chat_template == "{{ messages }}"


def test_a_model_without_an_end_token_is_noted(folder: Path):
    (folder / "config.json").write_text('{"model_type": "llama"}')
    config = parse_config({"model_id": "m", "target": {"path": str(folder)}})
    assert any(note.startswith("'m' names no end token: texts end at max_tokens") for note in check_models(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    assert not any("end token" in note for note in check_models(config))


def test_sampling_defaults_that_no_start_accepts_are_refused_unless_they_are_ignored(folder: Path):
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    target = {"path": str(folder)}
    with pytest.raises(ConfigError, match=r"generation_config.json has temperature -1; it must be in \[0, 2\]"):
        check_models(parse_config({"model_id": "m", "target": target}))
    check_models(parse_config({"model_id": "m", "target": {**target, "generation_config": "none"}}))

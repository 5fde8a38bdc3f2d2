"""Model folders with an invalid index or configuration, or without the files that transformers opens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.model.checkpoint.weight_files import (
    read_config,
    refuse_unindexed,
    refuse_untyped,
    tensor_headers,
    weight_files,
)
from protos.errors import ConfigError

INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000


def write_index(folder: Path, **index: object) -> None:
    (folder / INDEX).write_text(json.dumps(index))


def write_shards(folder: Path, *numbers: int) -> None:
    for number in numbers:
        save_file({f"w{number}": np.zeros(2)}, folder / f"model-0000{number}-of-00002.safetensors")


def test_files_are_those_of_the_index_in_order(tmp_path: Path):
    write_index(tmp_path, weight_map={"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]


@pytest.mark.parametrize(
    "weight_map", [{"a": 5}, {"a": None}, {"a": 5, "b": "x"}, {"a": ["x"]}, {"a": "\ud800"}, {"a": "a\0b"}, ["x"], None]
)
def test_an_index_with_invalid_names_is_refused(tmp_path: Path, weight_map: object):
    write_index(tmp_path, weight_map=weight_map)
    with pytest.raises(ConfigError, match=rf"{INDEX}' is not an index of weights.*fetch it again"):
        tensor_headers(tmp_path)


@pytest.mark.parametrize("name", ["../{}", "{folder}/{}", "sub/../../{}", "sub/{}", "..", ".", "", "..\\\\{}"])
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, name: str):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    save_file({"w": np.zeros(2)}, tmp_path / "x.safetensors")
    save_file({"w": np.zeros(2)}, folder / "sub" / "x.safetensors")
    write_index(folder, metadata={}, weight_map={"w": name.format("x.safetensors", folder=tmp_path)})
    with pytest.raises(ConfigError, match=rf"{INDEX}' is not an index of weights.*file names in its folder"):
        tensor_headers(folder)


def test_files_of_an_index_may_be_links_as_in_the_cache_of_the_hub(tmp_path: Path):
    (tmp_path / "model").mkdir()
    save_file({"w": np.zeros(2)}, tmp_path / "blob")
    (tmp_path / "model" / "x.safetensors").symlink_to(tmp_path / "blob")
    write_index(tmp_path / "model", metadata={}, weight_map={"w": "x.safetensors"})
    assert set(tensor_headers(tmp_path / "model")) == {"w"}


@pytest.mark.parametrize("text", [DEEP, "{", "[]"])
@pytest.mark.parametrize(("name", "read"), [(INDEX, weight_files), ("config.json", read_config)])
def test_invalid_json_is_refused_by_its_file(tmp_path: Path, name: str, read, text: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name}' .*; .*fetch it again"):
        read(tmp_path)


def test_a_whole_model_is_one_file_or_has_an_index_with_metadata(tmp_path: Path):
    write_shards(tmp_path, 1, 2)
    write_index(tmp_path, metadata={}, weight_map={"w1": "model-00001-of-00002.safetensors"})
    refuse_unindexed(tmp_path, {})
    (tmp_path / INDEX).unlink()
    refuse_unindexed(tmp_path, {"transformers_weights": "model-00001-of-00002.safetensors"})
    save_file({"w": np.zeros(2)}, tmp_path / "model.safetensors")
    refuse_unindexed(tmp_path, {})


@pytest.mark.parametrize(("numbers", "named"), [((), "none"), ((1,), "model-00001"), ((1, 2), "model-00001")])
def test_shards_without_their_index_are_refused(tmp_path: Path, numbers: tuple[int, ...], named: str):
    write_shards(tmp_path, *numbers)
    with pytest.raises(ConfigError, match=rf"in it: {named}.*\); fetch {INDEX} and the parts"):
        refuse_unindexed(tmp_path, {})


@pytest.mark.parametrize("index", [{}, {"metadata": None}, {"metadata": []}])
def test_an_index_that_transformers_does_not_read_is_refused(tmp_path: Path, index: dict[str, object]):
    write_index(tmp_path, weight_map={}, **index)
    with pytest.raises(ConfigError, match=f"{INDEX}' has no mapping 'metadata'.*fetch it again, or add"):
        refuse_unindexed(tmp_path, {})


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 5}])
def test_a_configuration_says_its_type(tmp_path: Path, config: dict[str, object]):
    with pytest.raises(ConfigError, match=r"config\.json' has model_type (None|5); it must name"):
        refuse_untyped(tmp_path, config)
    refuse_untyped(tmp_path, {"model_type": "llama"})

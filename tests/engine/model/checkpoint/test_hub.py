"""Models of a Hub: measured before they are fetched, fetched with progress, resumed where a download stopped."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from engine.model.checkpoint import node_memory
from engine.model.checkpoint.hub import cached_folder, fetch_model, find_model
from engine.model.checkpoint.node_memory import available_bytes, check_memory, check_pool_memory
from engine.model.checkpoint.progress import FOLDER_VARIABLE, read_progress
from protos.errors import ConfigError
from tests.engine.model.checkpoint.hub_server import Hub, running_hub

_SIZE = 100_000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(bytes(range(250)) * (_SIZE // 250))
    (folder / "consolidated.safetensors").write_bytes(b"the same in another format")
    with running_hub(folder) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # a cut download keeps whole chunks
        monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))
        find_model.cache_clear()
        yield hub
        find_model.cache_clear()


def test_a_model_is_fetched_once_with_progress_and_without_copies(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    progress = tmp_path / "progress"
    progress.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(progress))
    assert cached_folder(hub.model_id) is None
    folder = fetch_model(hub.model_id)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()
    (told,) = read_progress(progress).values()
    assert (told.activity, told.model, told.num_bytes, told.is_done) == ("fetching", hub.model_id, _SIZE, True)
    assert fetch_model(hub.model_id) == cached_folder(hub.model_id) == folder
    assert hub.num_downloads == 1


def test_a_download_that_was_cut_goes_on_where_it_stopped(hub: Hub, caplog: pytest.LogCaptureFixture):
    hub.cut_bytes, hub.refuses_rest = 60_000, True
    with pytest.raises(ConfigError, match=r"the Hub does not provide it: .*403.*Fetched files are kept"):
        fetch_model(hub.model_id)
    hub.refuses_rest, hub.ranges = False, []
    with caplog.at_level(logging.INFO):
        folder = fetch_model(hub.model_id)
    assert hub.ranges == [f"bytes=60000-{_SIZE - 1}"] or hub.ranges == ["bytes=60000-"]
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()
    assert "fetching org/tiny: 0.1 MB of 0.1 MB" in caplog.text


def test_parts_of_two_versions_are_not_joined(hub: Hub):
    (file,) = find_model(hub.model_id).weights
    file.partial.parent.mkdir(parents=True)
    file.partial.write_bytes(b"x" * 500)
    with pytest.raises(ConfigError, match="does not match its digest on the Hub"):
        fetch_model(hub.model_id)
    fetch_model(hub.model_id)


def test_a_model_larger_than_memory_or_disk_is_refused_before_a_byte_is_fetched(hub: Hub, tmp_path: Path):
    hub.sizes["model.safetensors"] = 1 << 50
    with pytest.raises(ConfigError, match=r"1048576\.0 GiB, but this node has .* nothing was fetched"):
        fetch_model(hub.model_id)
    assert hub.num_downloads == 0


def test_a_folder_larger_than_memory_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_file({"a": np.zeros((100, 3), np.float32), "b": np.zeros(50, np.int32)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(node_memory, "available_bytes", lambda: 650)
    check_memory(tmp_path, "tiny", float_bytes=2)
    with pytest.raises(ConfigError, match=r"the weights of 'tiny' take .* but this node has"):
        check_memory(tmp_path, "tiny", float_bytes=4)


def test_a_model_that_is_not_there_is_refused_by_name(hub: Hub):
    with pytest.raises(ConfigError, match=r"'org/none' is not a local folder.*404"):
        fetch_model("org/none")


def test_a_container_with_a_limit_has_less_memory_than_its_node(tmp_path: Path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert available_bytes(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 500


def test_a_pool_that_the_node_could_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "available_bytes", lambda: 3 << 30)
    check_pool_memory(3 << 30)
    with pytest.raises(ConfigError, match=r"takes up to 4.0 GiB, but this node has 3.0 GiB.*lower cache.memory_gib"):
        check_pool_memory(4 << 30)

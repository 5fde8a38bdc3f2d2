"""A checkpoint that cannot be a pair's draft is refused with its reason, and one that can passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.draft.draft_process import check_candidate
from actors.settings import DraftSettings, PairSettings
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.model.checkpoint import node_memory
from protos.errors import RequestError
from protos.messages import SpeculationMethod
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, write_tokenizer
from tests.engine.fixtures.checkpoints import Folders, write_checkpoint, write_pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folders = write_pair(tmp_path_factory.mktemp("pair"), noise=0.05)
    write_tokenizer(folders.target)
    write_tokenizer(folders.draft)
    return folders


@pytest.fixture
def settings(folders: Folders) -> PairSettings:
    cache = CacheConfig(num_blocks=64, memory_bytes=None)
    draft = DraftSettings(SpeculationMethod.MODEL, ModelConfig(str(folders.draft), "float32", device="cpu"), cache)
    return PairSettings(EngineConfig(ModelConfig(str(folders.target), "float32", device="cpu"), cache), draft)


def test_a_draft_with_other_weights_passes(settings: PairSettings, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=3)
    check_candidate(settings, str(tmp_path))


def set_one(folder: Path, value: float) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][5] = value
    save_file(tensors, file, {"format": "pt"})


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop_norm(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: set_one(folder, torch.nan), r"1 of 32 values of 'model.norm.weight' .* NaN or infinite"),
        (lambda folder: set_one(folder, torch.inf), r"NaN or infinite"),
        (cut, "not a whole safetensors file"),
        (drop_norm, "1 tensors are missing, 'model.norm.weight'"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "none"}'), "no model configuration"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights in safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json on node"),
    ],
)
def test_a_spoilt_checkpoint_is_refused(
    settings: PairSettings, tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    write_checkpoint(tmp_path, seed=3)
    spoil(tmp_path)
    with pytest.raises(RequestError, match=reason) as caught:
        check_candidate(settings, str(tmp_path))
    assert caught.value.param == "path"
    assert str(tmp_path) in caught.value.message


def test_a_draft_with_another_vocabulary_is_refused(settings: PairSettings, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=3, vocab_size=BYTE_VOCAB_SIZE + 90)
    with pytest.raises(RequestError, match="vocabulary has 390 tokens"):
        check_candidate(settings, str(tmp_path))


def test_a_draft_that_memory_cannot_hold_is_refused(
    settings: PairSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, seed=3)
    monkeypatch.setattr(node_memory, "available_bytes", lambda: 1000)
    with pytest.raises(RequestError, match=r"GiB, but this node has 0\.0 GiB"):
        check_candidate(settings, str(tmp_path))

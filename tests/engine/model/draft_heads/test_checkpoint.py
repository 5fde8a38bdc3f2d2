"""Files of heads in torch's own format, which is pickle: tensors are read, and nothing in it is run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.model.draft_heads.checkpoint import Weights, head_version, read_tensors
from protos.errors import ConfigError


class Hostile:
    """Pickles as a call that writes `file`."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self._file, "run")


@pytest.mark.parametrize("is_zipped", [True, False])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_code_in_a_pickled_head_is_refused_and_not_run(tmp_path: Path, name: str, is_zipped: bool) -> None:
    hostile = {"0.0.linear.weight": torch.ones(2), "more": Hostile(tmp_path / "ran")}
    torch.save(hostile, tmp_path / name, _use_new_zipfile_serialization=is_zipped)
    with pytest.raises(ConfigError, match=r"the weights in .* cannot be read: .*[Ww]eights.only"):
        read_tensors(tmp_path, ("medusa_lm_head.pt",))
    assert not (tmp_path / "ran").exists()


def test_a_bare_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Hostile(tmp_path / "ran")}))
    with pytest.raises(ConfigError, match=r"the weights in .* cannot be read"):
        read_tensors(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("contents", [[torch.ones(2)], torch.ones(2), 5, {"w": 5}, {"w": {"a": torch.ones(2)}}])
def test_what_is_no_mapping_of_tensors_is_refused(tmp_path: Path, contents: object) -> None:
    torch.save(contents, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"the weights in .* cannot be read: .* does not map names to tensors"):
        read_tensors(tmp_path)


def test_safetensors_come_before_a_pickled_copy(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"w": Hostile(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    assert torch.equal(read_tensors(tmp_path)["w"], torch.ones(2))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "mask_embedding.pt", "model.safetensors", "config.json"])
def test_every_file_of_a_head_is_part_of_its_digest(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = head_version(str(tmp_path))
    (tmp_path / name).write_bytes(b"{ }")
    assert head_version(str(tmp_path)) != before


def test_a_tensor_that_is_not_finite_is_refused_by_name() -> None:
    weights = Weights({"fc": torch.tensor([1.0, torch.nan])}, "the head")
    with pytest.raises(ConfigError, match="1 of 2 values of 'fc' in 'the head' are NaN"):
        weights.take("fc", (2,))

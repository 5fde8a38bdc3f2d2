"""`tie_word_embeddings` decides which tensor of a checkpoint is the head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3TextConfig

from engine.config import ModelConfig
from engine.model.loader import load_model
from protos.errors import ConfigError
from tests.engine.fixtures.families import PLAIN, SERVED, write_family


def set_tied(folder: Path, *, is_tied: bool) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": is_tied}))


def write(folder: Path, *, is_tied: bool, has_head: bool = True, has_embedding: bool = True) -> dict[str, torch.Tensor]:
    """Write a Llama whose head and embedding differ, and return its tensors."""
    write_family(folder, SERVED["llama"]())
    set_tied(folder, is_tied=is_tied)
    weights = load_file(folder / "model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    kept = dict(weights)
    if not has_head:
        del kept["lm_head.weight"]
    if not has_embedding:
        del kept["model.embed_tokens.weight"]
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


@pytest.mark.parametrize(
    ("is_tied", "kept", "head"),
    [
        (True, {}, "model.embed_tokens.weight"),
        (False, {}, "lm_head.weight"),
        (True, {"has_head": False}, "model.embed_tokens.weight"),
        (True, {"has_embedding": False}, "lm_head.weight"),
    ],
)
def test_the_head_is_what_the_configuration_says(
    is_tied: bool, kept: dict[str, bool], head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = write(tmp_path, is_tied=is_tied, **kept)
    model = load_model(ModelConfig(str(tmp_path), dtype="float32", device="cpu"))
    assert torch.equal(model.get_output_embeddings().weight, weights[head])
    assert ("has a separate head, which is ignored" in caplog.text) == (is_tied and not kept)


def test_a_head_that_is_neither_tied_nor_there_is_refused(tmp_path: Path) -> None:
    write(tmp_path, is_tied=False, has_head=False)
    with pytest.raises(ConfigError, match=r"tensors are missing, 'lm_head\.weight'"):
        load_model(ModelConfig(str(tmp_path), dtype="float32", device="cpu"))


@pytest.mark.parametrize("is_tied", [True, False])
def test_of_a_model_within_another_the_outer_configuration_says_so(is_tied: bool, tmp_path: Path) -> None:
    text = Gemma3TextConfig(**PLAIN, head_dim=8)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**sizes, "image_size": 28, "patch_size": 14})
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    model = write_family(tmp_path, config)
    set_tied(tmp_path, is_tied=is_tied)
    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32", device="cpu"))
    wanted = model.get_input_embeddings() if is_tied else model.get_output_embeddings()
    assert torch.equal(loaded.get_output_embeddings().weight, wanted.weight)

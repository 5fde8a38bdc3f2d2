"""Checkpoints of several media: their text part is read, whatever stores it, and computes what transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3nConfig,
    Gemma3nTextConfig,
    Mistral3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
)

from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.outline import check_outline
from tests.engine.fixtures.families import PLAIN, VOCAB_SIZE
from tests.engine.model.checkpoint.quantized_folders import BLOCK_FP8, blocks, float8

TEXT = torch.randint(3, VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(1)).tolist()
SIZES = PLAIN | {"pad_token_id": 0, "tie_word_embeddings": False}
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
RECURRENT = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
GEMMA_3N = {
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "laurel_rank": 8, "head_dim": 8},
    **{"intermediate_size": [64, 64], "activation_sparsity_pattern": [0.9, 0.0], "num_kv_shared_layers": 0},
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: dict[str, PreTrainedConfig] = {
    "mistral3": Mistral3Config(
        text_config={"model_type": "ministral3", **SIZES}, vision_config={"image_size": 28, "patch_size": 14, **TINY}
    ),
    "qwen3_5": Qwen3_5Config(
        text_config=SIZES | RECURRENT, vision_config={"patch_size": 14, **TOWER}, tie_word_embeddings=False
    ),
}


def written(folder: Path, config: PreTrainedConfig, *, has_float8: bool) -> PreTrainedModel:
    """Write a checkpoint with all its media, and return the whole model in float32; float8 keeps its numbers."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape).mul_(0.2).to(torch.float8_e4m3fn).float()
    model.save_pretrained(folder)
    if has_float8:
        stored = load_file(folder / "model.safetensors")
        for name in [each for each in stored if each.endswith("_proj.weight") and "language_model" in each]:
            module, weight = name.removesuffix("weight"), stored.pop(name)
            parts, _ = float8(weight, blocks, "weight_scale_inv")
            parts["weight_scale_inv"].fill_(1.0)
            stored |= {module + last: part for last, part in parts.items()}
        save(folder, stored, {**read(folder), "quantization_config": BLOCK_FP8})
    return model.requires_grad_(False)


def read(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "config.json").read_text()))


def save(folder: Path, weights: dict[str, Tensor], config: dict[str, object]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def compare(folder: Path, stock: PreTrainedModel) -> None:
    """Compare the logits of a text, and see `outrider check` take the folder."""
    model = ModelConfig(str(folder), dtype="float32")
    check_outline(model, CacheConfig(num_blocks=8))
    runner = ModelRunner(model, CacheConfig(num_blocks=8, num_states=4))
    expected = stock(torch.tensor([TEXT]), use_cache=False).logits[0]
    found = runner.forward([Span(TEXT, 0, [0, 1], len(TEXT))])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("has_float8", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_text_part_of_a_whole_checkpoint_is_served(tmp_path: Path, name: str, has_float8: bool) -> None:
    compare(tmp_path, written(tmp_path, MODELS[name], has_float8=has_float8))


def test_gemma_3n_needs_no_library_of_its_image_tower(tmp_path: Path) -> None:
    """It is stored as transformers stores the whole model, which cannot be made here."""
    torch.manual_seed(0)
    config = Gemma3nTextConfig(**SIZES | GEMMA_3N | {"tie_word_embeddings": True})
    text = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in text.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    stored = {f"model.language_model.{name}": each for name, each in text.model.state_dict().items()}
    save(
        tmp_path,
        stored | {"model.vision_tower.weight": torch.zeros(3)},
        Gemma3nConfig(text_config=config.to_dict()).to_dict(),
    )
    compare(tmp_path, text.requires_grad_(False))

"""A served model keeps its packed weights and nothing of the files that it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from engine.config import CacheConfig, HeadConfig, HeadKind, ModelConfig, Quantization
from engine.model.linear.packed_linear import linear_of
from engine.model.linear.quantized_linear import can_quantize
from engine.model.resident_memory import leave_checkpoint
from engine.model.runner.model_runner import ModelRunner
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.families import PLAIN, SERVED, write_family
from tests.engine.fixtures.heads.block_heads import (
    BlockShape,
    block_tensors,
    peagle_tensors,
    write_block_head,
    write_peagle,
)
from tests.engine.fixtures.heads.eagle3_fixtures import head_tensors, write_original
from tests.engine.fixtures.heads.heads_fixtures import write_llama_with_mtp, write_vllm_medusa

TIED = LlamaConfig(**PLAIN, tie_word_embeddings=True)
BIASED = LlamaConfig(**PLAIN, attention_bias=True, mlp_bias=True)


def mapped(folder: Path) -> list[str]:
    """Files below `folder` that this process has mapped."""
    return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def runner_of(folder: Path, dtype: str, quantization: str = "none", head: HeadConfig | None = None) -> ModelRunner:
    model = ModelConfig(str(folder), dtype, "cpu", quantization=quantization)
    return ModelRunner(model, CacheConfig(num_blocks=2), head=head)


def write(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """In shards of a few tensors each."""
    write_family(folder, config).to(dtype).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("config", [TIED, BIASED, *(SERVED[name]() for name in ("gpt2", "phi", "deepseek_v3"))])
def test_no_page_of_the_checkpoint_stays_mapped(tmp_path: Path, config: PreTrainedConfig, dtype: str) -> None:
    write(tmp_path, config, getattr(torch, dtype))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    runner = runner_of(tmp_path, dtype)
    assert runner.vocab_size == config.vocab_size
    assert mapped(tmp_path) == []


@pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="no int8 units")
@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_no_page_of_a_quantized_checkpoint_stays_mapped(tmp_path: Path, quantization: Quantization) -> None:
    write(tmp_path, BIASED, torch.bfloat16)
    runner = runner_of(tmp_path, "bfloat16", quantization)
    assert runner.num_blocks == 2
    assert mapped(tmp_path) == []


@pytest.mark.parametrize("kind", [kind for kind in HeadKind if kind is not HeadKind.SELF])  # which has no files
def test_no_page_of_a_head_or_its_target_stays_mapped(tmp_path: Path, kind: HeadKind) -> None:
    target, path = tmp_path / "target", tmp_path / "head"
    write_checkpoint(target, seed=1)
    shape = BlockShape(markov_type="vanilla" if kind is HeadKind.DSPARK else None)
    if kind is HeadKind.EAGLE3:
        write_original(path, head_tensors(target, 3), (0, 1, 2))
    elif kind is HeadKind.PEAGLE:
        write_peagle(path, peagle_tensors(target, 3), (0, 1, 2))
    elif kind in (HeadKind.DFLASH, HeadKind.DSPARK):
        write_block_head(path, block_tensors(target, 2, shape), (1, 2), shape)
    elif kind is HeadKind.MEDUSA:
        write_vllm_medusa(path, target)
    else:
        write_llama_with_mtp(target, num_mtp_layers=2)
    runner = runner_of(target, "float32", head=HeadConfig(kind, None if kind is HeadKind.MTP else str(path)))
    assert runner.head is not None
    assert mapped(tmp_path) == []


def test_a_tied_embedding_stays_one_tensor(tmp_path: Path) -> None:
    write(tmp_path, TIED, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    leave_checkpoint(model, linear_of)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_that_will_be_packed_are_not_copied() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024)).bfloat16().requires_grad_(False)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    leave_checkpoint(model, lambda weight, bias: linear_of(weight, bias))
    moved = {name for name, parameter in model.named_parameters() if parameter.data_ptr() != addresses[name]}
    assert moved == {"0.bias", "1.weight", "1.bias"}

"""The published GGUF file holds the served weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, ReaderTensor
from safetensors import safe_open

from engine.config import Quantization
from engine.model.linear.quantized_linear import quantizer
from tests.engine.model.checkpoint.gguf_blocks import BLOCKS

pytestmark = pytest.mark.real_model

ROWS = slice(100, 104)
NAMES = {
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    "token_embd.weight": "model.embed_tokens.weight",
}


@pytest.fixture(scope="module")
def numbers(smollm2_folder: Path) -> dict[str, torch.Tensor]:
    """Some rows of tensors of the file, by the definition of their blocks, each [4, in] float32."""
    (file,) = (smollm2_folder / "gguf").glob("*.gguf")
    return {each.name: _numbers_of(each) for each in GGUFReader(file).tensors if each.name in NAMES}


def _numbers_of(tensor: ReaderTensor) -> torch.Tensor:
    _, _, num_bytes, _, read = BLOCKS[tensor.tensor_type.name]
    blocks = np.asarray(tensor.data)[ROWS].reshape(-1, num_bytes)
    return torch.tensor([number for block in blocks for number in read(block.tobytes())]).reshape(4, -1)


@pytest.mark.parametrize("name", NAMES)
def test_its_blocks_are_the_served_weights(smollm2_folder: Path, numbers: dict[str, torch.Tensor], name: str) -> None:
    with safe_open(smollm2_folder / "model.safetensors", framework="pt") as weights:
        served = weights.get_slice(NAMES[name])[ROWS]
    assert torch.equal(served, numbers[name].to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_requantized_weights_are_those_of_its_blocks(
    numbers: dict[str, torch.Tensor], name: str, dtype: torch.dtype
) -> None:
    weight = numbers[name].to(dtype)
    round_ = quantizer(weight.repeat(8, 1), Quantization.INT4, is_head=name == "token_embd.weight")
    assert round_ is not None
    assert torch.equal(round_(weight).dequantized(), numbers[name])

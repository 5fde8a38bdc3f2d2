"""The GGUF file as shipped stands for the weights that are served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors import safe_open

from engine.model.linear.quantized_linear import to_int4, to_int8
from tests.engine.model.checkpoint.gguf_blocks import BLOCKS

pytestmark = pytest.mark.real_model

ROWS = slice(100, 104)
NAMES = {
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    "token_embd.weight": "model.embed_tokens.weight",
}


def numbers_of(folder: Path, name: str) -> torch.Tensor:
    """Some rows of a tensor of the file, by the definition of its blocks, [4, in] float32."""
    (file,) = (folder / "gguf").glob("*.gguf")
    (tensor,) = (each for each in GGUFReader(file).tensors if each.name == name)
    _, _, num_bytes, _, read = BLOCKS[tensor.tensor_type.name]
    blocks = np.asarray(tensor.data)[ROWS].reshape(-1, num_bytes)
    return torch.tensor([number for block in blocks for number in read(block.tobytes())]).reshape(4, -1)


@pytest.mark.parametrize("name", NAMES)
def test_its_blocks_are_the_served_weights(smollm2_folder: Path, name: str) -> None:
    numbers = numbers_of(smollm2_folder, name)
    with safe_open(smollm2_folder / "model.safetensors", framework="pt") as weights:
        served = weights.get_slice(NAMES[name])[ROWS]
    assert torch.equal(served, numbers.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_requantized_weights_are_those_of_its_blocks(smollm2_folder: Path, name: str, dtype: torch.dtype) -> None:
    numbers = numbers_of(smollm2_folder, name)
    requantize = to_int8 if name == "token_embd.weight" else to_int4
    assert torch.equal(requantize(numbers.to(dtype)).dequantized(), numbers)

"""The GGUF file as shipped stands for the weights that are served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors import safe_open

from tests.engine.model.checkpoint.gguf_blocks import BLOCKS

pytestmark = pytest.mark.real_model

ROWS = slice(100, 104)
NAMES = {
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    "token_embd.weight": "model.embed_tokens.weight",
}


@pytest.mark.parametrize("name", NAMES)
def test_its_blocks_are_the_served_weights(smollm2_folder: Path, name: str) -> None:
    (file,) = (smollm2_folder / "gguf").glob("*.gguf")
    (tensor,) = (each for each in GGUFReader(file).tensors if each.name == name)
    _, _, num_bytes, _, read = BLOCKS[tensor.tensor_type.name]
    blocks = np.asarray(tensor.data)[ROWS].reshape(-1, num_bytes)
    numbers = torch.tensor([number for block in blocks for number in read(block.tobytes())])
    with safe_open(smollm2_folder / "model.safetensors", framework="pt") as weights:
        served = weights.get_slice(NAMES[name])[ROWS]
    assert torch.equal(served, numbers.reshape(served.shape).to(torch.bfloat16))

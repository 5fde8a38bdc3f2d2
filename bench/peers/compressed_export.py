"""A checkpoint of compressed-tensors with matrices in int8, which vLLM multiplies by rows rounded to int8 (W8A8).

Each output has a scale, the largest weight over 127. Embeddings and the head keep their dtype.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def export_int8(model: Path, out: Path) -> None:
    """Write the folder of a model with its projections in int8."""
    out.mkdir()
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors |= _quantized(name, tensor) if name.endswith("_proj.weight") else {name: tensor}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in model.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, out)
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))


def _quantized(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-8)
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale.to(torch.bfloat16)}

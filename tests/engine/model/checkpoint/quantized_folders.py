"""Small Llamas whose linear layers are written in the formats of quantized checkpoints, with their exact weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.bitnet import pack_weights

GROUP = 32
Written = tuple[dict[str, Tensor], Tensor]  # tensors by their last name, and the weight [out, in] float32
Writer = Callable[[Tensor], Written]


def llama(folder: Path, *, is_tied: bool = True, **sizes: int) -> dict[str, Tensor]:
    """Write a small Llama of random weights and return them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, **sizes}
    config = LlamaConfig(
        **sizes,
        intermediate_size=128,
        num_hidden_layers=2,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def quantize_folder(
    folder: Path, write: Writer, section: Mapping[str, Any], *, is_tied: bool = True, **sizes: int
) -> dict[str, Tensor]:
    """Write a Llama with quantized linear layers; return its weights as they are to be read, in float32."""
    weights, expected = {}, {}
    for name, weight in llama(folder, is_tied=is_tied, **sizes).items():
        module = name.removesuffix(".weight")
        if module.endswith(("_proj", "lm_head")):
            parts, expected[name] = write(weight)
            weights |= {f"{module}.{last}": part.contiguous() for last, part in parts.items()}
        else:
            weights[name] = expected[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return expected


def gptq(
    weight: Tensor, zero_offset: int = 1, num_bits: int = 4, group_size: int = GROUP, *, is_ordered: bool = False
) -> Written:
    """A matrix as AutoGPTQ writes it: words along the inputs; a zero point is stored less `zero_offset`."""
    num_outputs, num_inputs = weight.shape
    order = torch.randperm(num_inputs) if is_ordered else torch.arange(num_inputs)
    group_of = order // group_size
    levels, scales, zeros = _random_levels(num_inputs, num_outputs, num_bits, group_size)
    expected = torch.empty(num_outputs, num_inputs)
    for row in range(num_inputs):
        group = group_of[row]
        expected[:, row] = (levels[row] - zeros[group]) * scales[group].float()
    parts = {
        "qweight": _pack(levels.T, num_bits).T,
        "qzeros": _pack(zeros - zero_offset & (1 << num_bits) - 1, num_bits),
        "scales": scales,
        "g_idx": group_of.int(),
    }
    return parts, expected


def awq(weight: Tensor) -> Written:
    """A matrix as AutoAWQ's gemm writes it: words along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    num_outputs, num_inputs = weight.shape
    levels, scales, zeros = _random_levels(num_inputs, num_outputs, 4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def pack(numbers: Tensor) -> Tensor:
        return _pack(numbers.reshape(len(numbers), -1, 8)[:, :, order].flatten(1), 4)

    expected = (levels - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)
    return {"qweight": pack(levels), "qzeros": pack(zeros), "scales": scales}, expected.T


def float8(weight: Tensor, scales_shape: Callable[[int, int], tuple[int, ...]], name: str = "weight_scale") -> Written:
    """Float8 with random scales of a shape; the weight as it is meant."""
    scales = torch.rand(scales_shape(*weight.shape)) + 0.5
    numbers = weight.to(torch.float8_e4m3fn)
    grid = scales.reshape(len(scales), -1) if scales.ndim else scales.reshape(1, 1)
    step = (-(-len(weight) // len(grid)), -(-weight.shape[1] // grid.shape[1]))
    expected = numbers.float() * torch.kron(grid, torch.ones(step))[: len(weight), : weight.shape[1]]
    return {"weight": numbers, name: scales, "input_scale": torch.ones(())}, expected


def bitnet(weight: Tensor, *, divides: bool = True) -> Written:
    """Numbers -1, 0 and 1 as transformers packs them, with one scale."""
    numbers, scale = torch.randint(-1, 2, weight.shape), torch.rand(1) + 0.5
    expected = numbers / scale if divides else numbers * scale
    return {"weight": pack_weights(numbers), "weight_scale": scale}, expected


def trained_bitnet(weight: Tensor) -> Written:
    """A weight in floats, which BitNet's layers round at each use."""
    factor = 1 / weight.abs().mean()
    return {"weight": weight}, (weight * factor).round().clamp(-1, 1) / factor


def without_group_index(written: Written) -> Written:
    """The same matrix without the group of each input, as it is where these are in order."""
    parts, expected = written
    return {last: part for last, part in parts.items() if last != "g_idx"}, expected


def _random_levels(
    num_inputs: int, num_outputs: int, num_bits: int, group_size: int = GROUP
) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [in, out], scales and zero points [groups, out]."""
    shape = (-(-num_inputs // group_size), num_outputs)
    levels = torch.randint(0, 1 << num_bits, (num_inputs, num_outputs))
    zeros = torch.randint(1, 1 << num_bits, shape)
    return levels, (torch.rand(shape) * 0.1 + 0.01).half(), zeros


def _pack(numbers: Tensor, num_bits: int) -> Tensor:
    """[n, m] -> [n, m * bits / 32] int32, lowest bits first."""
    words = numbers.reshape(len(numbers), -1, 32 // num_bits)
    shifts = torch.arange(0, 32, num_bits)
    return (words.long() << shifts).sum(-1).to(torch.int32)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "fmt": "e4m3"}

BITNET = {"quant_method": "bitnet", "modules_to_not_convert": None}


def blocks(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 32), -(-columns // 32)


BY_DEFINITION = {
    "gptq": (gptq, GPTQ),
    "gptq with another order": (partial(gptq, is_ordered=True), {**GPTQ, "desc_act": True}),
    "gptq_v2": (partial(gptq, zero_offset=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq of 8 bits": (partial(gptq, num_bits=8), {**GPTQ, "bits": 8}),
    "gptq, the last group smaller": (partial(gptq, group_size=48), {**GPTQ, "group_size": 48}),
    "gptq so, without the groups' index": (
        lambda weight: without_group_index(gptq(weight, group_size=48)),
        {**GPTQ, "group_size": 48},
    ),
    "awq": (awq, AWQ),
    "fp8 per tensor": (partial(float8, scales_shape=lambda *_: ()), FP8),
    "fp8 per tensor, [1]": (partial(float8, scales_shape=lambda *_: (1,)), FP8),
    "fp8 per channel": (partial(float8, scales_shape=lambda rows, _: (rows, 1)), {"quant_method": "fbgemm_fp8"}),
    "fp8 per block": (partial(float8, scales_shape=blocks, name="weight_scale_inv"), BLOCK_FP8),
    "bitnet": (bitnet, BITNET),
    "bitnet whose scales are factors": (partial(bitnet, divides=False), {**BITNET, "linear_class": "autobitlinear"}),
    "bitnet in floats": (
        trained_bitnet,
        {**BITNET, "linear_class": "autobitlinear", "quantization_mode": "online"},
    ),
}

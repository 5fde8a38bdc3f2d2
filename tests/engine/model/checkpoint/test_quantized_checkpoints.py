"""Checkpoints in GPTQ, AWQ, FP8 and compressed-tensors: dequantized by their definitions, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cluster.checkpoints import check_models, gpu_weight_bytes, weight_bytes
from cluster.config import parse_config
from engine.config import CacheConfig, ModelConfig, Quantization
from engine.model.checkpoint.unread_weight import read_weight
from engine.model.linear.quantized_linear import can_quantize
from engine.model.loader import load_model
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.families import SERVED, write_family
from tests.engine.model.checkpoint.quantized_folders import (
    AWQ,
    BITNET,
    BLOCK_FP8,
    BY_DEFINITION,
    GPTQ,
    GROUP,
    Written,
    awq,
    blocks,
    gptq,
    llama,
    quantize_folder,
    trained_bitnet,
    without_group_index,
)


def compressed(group: dict[str, Any], layout: str) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": group}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": []}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
BY_LIBRARY = {
    "int4 by group": compressed(INT4, "pack-quantized"),
    "int4 by group with zero points": compressed({**INT4, "symmetric": False}, "pack-quantized"),
    "int8 packed by channel": compressed(INT8, "pack-quantized"),
    "int8 by channel": compressed(INT8, "int-quantized"),
    "float8 by channel": compressed(FLOAT8, "float-quantized"),
    "float8 by tensor": compressed({**FLOAT8, "strategy": "tensor"}, "float-quantized"),
    "float8 by block": compressed({**FLOAT8, "strategy": "block", "block_structure": [32, 32]}, "float-quantized"),
}


def read(folder: Path) -> dict[str, Tensor]:
    return dict(load_model(ModelConfig(str(folder), "float32")).state_dict())


def check(folder: Path) -> None:
    check_models(parse_config({"model_id": "m", "target": {"path": str(folder)}, "draft": {"kind": "none"}}))


def test_a_gpu_counts_few_bits_as_the_files_have_them_and_ranks_do_not(tmp_path: Path) -> None:
    write, section = BY_DEFINITION["fp8 per channel"]
    quantize_folder(tmp_path, write, section)
    files, path = (tmp_path / "model.safetensors").stat().st_size, str(tmp_path)
    assert gpu_weight_bytes(path) == files < weight_bytes(path)
    assert gpu_weight_bytes(path, num_ranks=2) == weight_bytes(path) // 2
    assert gpu_weight_bytes(path, Quantization.INT4) == int(0.4 * weight_bytes(path))


@pytest.mark.parametrize("name", BY_DEFINITION)
def test_weights_are_what_the_definition_says(tmp_path: Path, name: str) -> None:
    write, section = BY_DEFINITION[name]
    expected = quantize_folder(tmp_path, write, section)
    check(tmp_path)
    weights = read(tmp_path)
    for each, weight in expected.items():
        torch.testing.assert_close(weights[each], weight, rtol=1e-6, atol=1e-6, msg=each)


def test_blocks_of_float8_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    write, section = BY_DEFINITION["fp8 per block"]
    quantize_folder(tmp_path, write, section)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, weight in read(tmp_path).items():
        torch.testing.assert_close(weight, stock[name], rtol=0, atol=0)


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    model = write_family(tmp_path, SERVED["gpt_oss"]())
    weights, expected = load_file(tmp_path / "model.safetensors"), {}
    for name, weight in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_inputs, num_outputs = weight.shape
            blocks = torch.randint(0, 256, (num_experts, num_outputs, num_inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 130, blocks.shape[:3], dtype=torch.uint8)
            del weights[name]
            weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    check(tmp_path)
    for name, weight in read(tmp_path).items():
        torch.testing.assert_close(read_weight(weight), expected.get(name, weights.get(name)), rtol=0, atol=0)
    ModelRunner(ModelConfig(str(tmp_path), "float32"), CacheConfig(num_blocks=4))
    changed(tmp_path, "model.layers.1.mlp.experts.down_proj_scales", lambda scales: scales[:, :-1].contiguous())
    with pytest.raises(ConfigError, match=r"down_proj' is mxfp4, but its blocks and scales are \[4, "):
        check(tmp_path)


def by_library(weight: Tensor, section: dict[str, Any]) -> Written:
    """Compress a weight and decompress it by the library compressed-tensors."""
    scheme = QuantizationScheme(**section["config_groups"]["group_0"])
    args, layout = scheme.weights, section["format"]
    assert args is not None
    grid = {"group": (len(weight), -(-weight.shape[1] // GROUP)), "channel": (len(weight), 1), "tensor": (1,)}
    shape = grid.get(args.strategy) or blocks(*weight.shape)
    scales = torch.rand(shape) * 0.02 + 0.01
    zeros = torch.zeros(shape, dtype=torch.int8)
    if not args.symmetric:
        zeros = torch.randint(-8, 8, shape, dtype=torch.int8)
    compressor: Any = BaseCompressor.get_value_from_registry(layout)
    parts = compressor.compress({"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}, scheme)
    return parts, compressor.decompress(parts, scheme)["weight"].float()


@pytest.mark.parametrize("name", BY_LIBRARY)
def test_compressed_tensors_are_read_as_their_library_reads_them(tmp_path: Path, name: str) -> None:
    section = BY_LIBRARY[name]
    expected = quantize_folder(tmp_path, partial(by_library, section=section), section, is_tied=False)
    check(tmp_path)
    weights = read(tmp_path)
    for each, weight in expected.items():
        torch.testing.assert_close(weights[each], weight, rtol=1e-6, atol=1e-6, msg=each)


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8])
def test_it_is_served_with_a_quantized_head_and_requantized(tmp_path: Path, quantization: Quantization) -> None:
    if quantization is not Quantization.NONE and not can_quantize(torch.device("cpu")):
        pytest.skip("no kernels for int8 weights here")
    quantize_folder(tmp_path, awq, AWQ, is_tied=False)
    runner = ModelRunner(ModelConfig(str(tmp_path), "float32", quantization=quantization), CacheConfig(num_blocks=4))
    assert runner.vocab_size == 96


@pytest.mark.parametrize(("names", "kept"), [(None, "lm_head"), (["up_proj"], "up_proj")])
def test_trained_weights_of_other_layers_are_not_rounded(tmp_path: Path, names: list[str] | None, kept: str) -> None:
    section = {**BITNET, "linear_class": "autobitlinear", "quantization_mode": "online"}
    expected = quantize_folder(tmp_path, trained_bitnet, section | {"modules_to_not_convert": names}, is_tied=False)
    stored = load_file(tmp_path / "model.safetensors")
    for name, weight in read(tmp_path).items():
        wanted = stored if kept in name else expected
        torch.testing.assert_close(weight, wanted[name], rtol=1e-6, atol=1e-6, msg=name)


REFUSED = {
    "of another method": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'"),
    "of 3 bits": ({**GPTQ, "bits": 3}, "bits is 3; it must be 4 or 8"),
    "of mixed bits": ({**GPTQ, "dynamic": {"-:.*": {}}}, "dynamic"),
    "for marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "'marlin'"),
    "of gemv": ({**AWQ, "version": "GEMV"}, "'gemv'"),
    "of nvfp4": (compressed(INT4, "nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
    "of layers with norms": ({**BITNET, "use_rms_norm": True}, "norm their rows \\('use_rms_norm'\\)"),
    "of unknown layers": ({**BITNET, "quantization_mode": "later"}, "its layers are 'bitlinear', 'later'"),
    "that are sparse": ({**compressed(INT4, "pack-quantized"), "sparsity_config": {"format": "x"}}, "sparse"),
    "without tensors": (AWQ | {"quant_method": "gptq"}, "no tensor name ends in '.qweight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    llama(tmp_path)
    section, reason = REFUSED[name]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    with pytest.raises(ConfigError, match=reason):
        check(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path)


DAMAGES = {
    "q_proj.scales": ("model.layers.1.self_attn.q_proj' is gptq, but its 'scales' is missing", None),
    "q_proj.qzeros": ("its 'qzeros' is missing", None),
    "q_proj.qweight": ("it has 'model.layers.1.self_attn.q_proj.g_idx', but no quantized", None),
    "up_proj.scales": (r"up_proj' is gptq, but its scales are \[128, 3\]", (3, 128)),
    "up_proj.qzeros": (r"its 'qzeros' is \[2, 15\]; it must be \[2, 16\]", (2, 15)),
    "up_proj.g_idx": (r"its 'g_idx' is \[63\]; it must be \[64\]", (63,)),
    "up_proj.qweight of 16 bits": ("its 'qweight' is I16; it must be I32", torch.int16),
    "up_proj.qzeros of floats": ("its 'qzeros' is F32; it must be I32", torch.float32),
    "up_proj.scales of integers": ("its 'scales' is I32; it must be floating", torch.int32),
    "up_proj.g_idx of bytes": ("its 'g_idx' is U8; it must be I32 or I64", torch.uint8),
}


def changed(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Rewrite a tensor of a folder."""
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: change(weights[name])}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("damaged", DAMAGES)
def test_a_tensor_that_is_missing_or_another_is_named_before_anything_starts(tmp_path: Path, damaged: str) -> None:
    quantize_folder(tmp_path, gptq, GPTQ)
    reason, damage = DAMAGES[damaged]
    weights = load_file(tmp_path / "model.safetensors")
    last = damaged.split()[0]
    name = next(each for each in weights if each.startswith("model.layers.1") and each.endswith(last))
    tensor = weights.pop(name)
    if isinstance(damage, tuple):
        weights[name] = torch.zeros(damage, dtype=tensor.dtype)
    elif damage is not None:
        weights[name] = tensor.to(damage)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=reason):
        check(tmp_path)


def test_a_whole_module_that_is_missing_is_named_at_load(tmp_path: Path) -> None:
    quantize_folder(tmp_path, gptq, GPTQ)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers.1.mlp.up_proj" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 tensors are missing, 'model.layers.1.mlp.up_proj.weight'"):
        read(tmp_path)


def test_an_order_of_inputs_without_their_groups_is_refused(tmp_path: Path) -> None:
    quantize_folder(tmp_path, lambda weight: without_group_index(gptq(weight)), {**GPTQ, "desc_act": True})
    with pytest.raises(ConfigError, match=r"is gptq, but its 'g_idx' is missing"):
        check(tmp_path)


@pytest.mark.parametrize("group", [-1, 2])
def test_an_input_of_no_group_is_refused_at_load(tmp_path: Path, group: int) -> None:
    quantize_folder(tmp_path, gptq, GPTQ)
    name = "model.layers.1.mlp.up_proj.g_idx"
    changed(tmp_path, name, lambda groups: torch.cat([groups[:-1], torch.tensor([group], dtype=torch.int32)]))
    with pytest.raises(ConfigError, match=r"up_proj' has inputs in groups (-1 to 1|0 to 2), but 2 scales;"):
        read(tmp_path)


def test_zero_points_go_with_the_scales(tmp_path: Path) -> None:
    section = BY_LIBRARY["int8 by channel"]
    quantize_folder(tmp_path, partial(by_library, section=section), section, is_tied=False)
    name = "model.layers.1.mlp.up_proj.weight_zero_point"
    weights = load_file(tmp_path / "model.safetensors") | {name: torch.zeros(3, dtype=torch.int8)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"its 'weight_zero_point' is \[3\]; it must be \[128, 1\]"):
        check(tmp_path)


@pytest.mark.parametrize("section", [None, {}])
@pytest.mark.parametrize(("name", "dtype"), [("fp8 per tensor", "F8_E4M3"), ("int8 by channel", "I8")])
def test_weights_in_few_bits_without_their_configuration_are_refused(
    tmp_path: Path, name: str, dtype: str, section: dict[str, Any] | None
) -> None:
    write, _ = BY_DEFINITION.get(name) or (partial(by_library, section=BY_LIBRARY[name]), None)
    quantize_folder(tmp_path, write, section, is_tied=False)
    reason = f"{dtype}, but config.json has no quantization_config" if section is None else "quant_method is None"
    with pytest.raises(ConfigError, match=reason):
        check(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path)


@pytest.mark.parametrize(
    "section",
    [
        *([GPTQ], "gptq", {"quant_method": ["gptq"]}, {**GPTQ, "group_size": "all"}),
        *({**BLOCK_FP8, "weight_block_size": block} for block in ([32], 32, "axb", [0, 0])),
        *({**compressed(INT4, "pack-quantized"), "config_groups": groups} for groups in ([INT4], {"group_0": None})),
        compressed({**INT4, "num_bits": None}, "pack-quantized"),
        {**compressed(INT4, "pack-quantized"), "format": ["pack-quantized"]},
        {**compressed(INT4, "pack-quantized"), "sparsity_config": "dense"},
    ],
    ids=str,
)
def test_a_section_that_no_method_writes_is_refused(tmp_path: Path, section: Any) -> None:
    quantize_folder(tmp_path, gptq, section)
    with pytest.raises(ConfigError, match=r"not supported: (quantization_config is |quant_method is )"):
        check(tmp_path)

"""Whatever a checkpoint's format, memory holds its served weights and one tensor of it, while it loads and after."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from engine.config import CacheConfig, ModelConfig, Quantization
from engine.model.linear.quantized_linear import can_quantize
from engine.model.resident_memory import trim_heap
from engine.model.runner.model_runner import ModelRunner
from tests.engine.fixtures.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="no kernels for int4 weights here")

SLACK = 96 << 20  # buffers of the loading: up to 50 MB more when other processes delay its threads
BITS = 5.0  # of an int4 weight with its scale and base
SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "head_dim": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = LlamaConfig(**SIZES, intermediate_size=2816)
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 4}
QWEN3_MOE = Qwen3MoeConfig(
    **{**SIZES, **EXPERTS}, num_experts=8, moe_intermediate_size=512, intermediate_size=1024, mlp_only_layers=[]
)
GPT_OSS = GptOssConfig(**{**SIZES, **EXPERTS}, num_local_experts=8, intermediate_size=512)
GEMMA = Gemma2Config(**SIZES, intermediate_size=2816)  # its layers are transformers' own
Parts = dict[str, Tensor]


def gptq(name: str, shape: tuple[int, ...]) -> Parts:
    (num_outputs, num_inputs), module = shape, name.removesuffix("weight")
    words, groups = torch.iinfo(torch.int32), num_inputs // 128
    return {
        f"{module}qweight": torch.randint(words.min, words.max, (num_inputs // 8, num_outputs), dtype=torch.int32),
        f"{module}qzeros": torch.full((groups, num_outputs // 8), 0x77777777, dtype=torch.int32),
        f"{module}scales": torch.full((groups, num_outputs), 0.004, dtype=torch.float16),
    }


def awq(name: str, shape: tuple[int, ...]) -> Parts:
    (num_outputs, num_inputs), module = shape, name.removesuffix("weight")
    words, groups = torch.iinfo(torch.int32), num_inputs // 128
    return {
        f"{module}qweight": torch.randint(words.min, words.max, (num_inputs, num_outputs // 8), dtype=torch.int32),
        f"{module}qzeros": torch.full((groups, num_outputs // 8), 0x55555555, dtype=torch.int32),
        f"{module}scales": torch.full((groups, num_outputs), 0.004, dtype=torch.float16),
    }


def float8(name: str, shape: tuple[int, ...]) -> Parts:
    numbers = torch.randint(0, 0x70, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale": torch.tensor(0.0001)}


def gguf(name: str, shape: tuple[int, ...]) -> Parts:
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 18), dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([0.004], dtype=torch.float16).view(torch.uint8)
    return {f"{name}.Q4_0": blocks.flatten(-2)}


def mxfp4(name: str, shape: tuple[int, ...]) -> Parts:
    num_experts, num_inputs, num_outputs = shape
    groups = num_experts, num_outputs, num_inputs // 32
    return {
        f"{name}_blocks": torch.randint(0, 256, (*groups, 16), dtype=torch.uint8),
        f"{name}_scales": torch.full(groups, 119, dtype=torch.uint8),
    }


def plain(name: str, shape: tuple[int, ...]) -> Parts:
    return {name: torch.empty(shape).uniform_(-0.02, 0.02).bfloat16()}


Writer = Callable[[str, tuple[int, ...]], Parts]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
FORMATS: dict[str, tuple[PreTrainedConfig, Writer, dict[str, object] | None]] = {
    "gptq": (LLAMA, gptq, GPTQ),
    "awq": (LLAMA, awq, AWQ),
    "fp8": (LLAMA, float8, {"quant_method": "fp8"}),
    "gguf": (LLAMA, gguf, {"quant_method": "gguf"}),
    "bfloat16 for stock layers in float32": (GEMMA, plain, None),
    "gptq of experts": (QWEN3_MOE, gptq, GPTQ),
    "fp8 of experts": (QWEN3_MOE, float8, {"quant_method": "fp8"}),
    "gguf of experts": (QWEN3_MOE, gguf, {"quant_method": "gguf"}),
    "mxfp4": (GPT_OSS, mxfp4, {"quant_method": "mxfp4"}),
}


def write(folder: Path, name: str) -> PreTrainedModel:
    """Write a checkpoint of random numbers; return its model, without numbers."""
    config, writer, section = FORMATS[name]
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    tensors: Parts = {}
    for parameter, weight in model.named_parameters():
        is_written = parameter.endswith("_proj.weight") or (weight.ndim == 3 and "bias" not in parameter)
        for part, shape in _parts(parameter, tuple(weight.shape), whole=writer in (gguf, mxfp4)):
            tensors |= (
                writer(part, shape) if is_written and (writer is not mxfp4 or len(shape) == 3) else plain(part, shape)
            )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text()) | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(saved | ({"quantization_config": section} if section else {})))
    return model


def _parts(name: str, shape: tuple[int, ...], *, whole: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a parameter; most formats have one for each expert."""
    if len(shape) < 3 or whole:
        yield name, shape
        return
    module, _, last = name.rpartition(".")
    names = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
    for expert in range(shape[0]):
        for each in names:
            yield f"{module}.{expert}.{each}.weight", (shape[1] // len(names), shape[2])


@pytest.fixture(scope="module", autouse=True)
def libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let torch and the kernels allocate their own buffers."""
    folder = tmp_path_factory.mktemp("small")
    write_checkpoint(folder, seed=1)
    ModelRunner(ModelConfig(str(folder), "float32", "cpu", quantization=Quantization.INT4), CacheConfig(num_blocks=2))


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) << 10


@pytest.mark.parametrize("name", FORMATS)
def test_the_peak_is_the_served_weights_and_a_tensor(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_GIB", "0")  # mapped files would count too
    model = write(tmp_path, name)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = resident("VmRSS")
    config = ModelConfig(str(tmp_path), "float32", "cpu", quantization=Quantization.INT4)
    runner = ModelRunner(config, CacheConfig(num_blocks=2))
    served = num_weights * BITS / 8
    peak, at_rest = resident("VmHWM") - before, resident("VmRSS") - before
    most = 1.15 * served + 4 * largest + SLACK
    assert most < 4 * num_weights, "a model that is dequantized whole would pass"
    assert peak <= most, f"{peak / 1e6:.0f} MB of {most / 1e6:.0f}; a whole model has {4 * num_weights / 1e6:.0f}"
    assert at_rest <= 1.15 * served + SLACK
    assert runner.vocab_size == 256

"""A model whose files have another dtype than its hidden states computes as transformers does after a conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    Cohere2MoeConfig,
    Gemma4TextConfig,
    NemotronHConfig,
    PhimoeConfig,
    PreTrainedConfig,
)

from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig, Quantization
from engine.model.checkpoint.node_memory import drop_pages
from engine.model.checkpoint.unread_weight import UnreadWeight, read_weight
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.loader import load_model
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.families import PLAIN, SERVED, write_family

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]
TOP = {**PLAIN, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32}
OTHER_MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2_moe": SERVED["qwen2_moe"],
    "afmoe": lambda: AfmoeConfig(**TOP, num_experts_per_tok=2, num_shared_experts=1, num_dense_layers=1),
    "gemma4_text": lambda: Gemma4TextConfig(
        **TOP, enable_moe_block=True, top_k_experts=2, hidden_size_per_layer_input=0, global_head_dim=8
    ),
    "gpt_oss": SERVED["gpt_oss"],
    "cohere2_moe": lambda: Cohere2MoeConfig(**PLAIN, head_dim=8, num_experts=4, num_shared_experts=1),
    "phimoe": lambda: PhimoeConfig(**PLAIN, num_local_experts=4),
    "nemotron_h": lambda: NemotronHConfig(
        **{name: size for name, size in PLAIN.items() if name != "num_hidden_layers"},
        **{"head_dim": 8, "mamba_num_heads": 32, "mamba_head_dim": 2, "ssm_state_size": 8, "n_groups": 2},
        **{"n_routed_experts": 4, "moe_intermediate_size": 32, "moe_latent_size": 32},
        layers_block_type=["mamba", "moe", "attention"],
        moe_shared_expert_intermediate_size=32,
    ),
}


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma4_text", "gpt_neox", "gpt2", "opt", *MIXTURES])
def test_logits_are_those_of_the_converted_model(tmp_path: Path, family: str, stored: torch.dtype) -> None:
    write_family(tmp_path, SERVED[family]()).to(stored).save_pretrained(tmp_path)
    runner = ModelRunner(ModelConfig(str(tmp_path), "float32", "cpu"), CacheConfig(num_blocks=2))
    logits = runner.forward([Span(TEXT, 0, [0], len(TEXT))])
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits, stock(torch.tensor([TEXT])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float32, "bfloat16"), (torch.bfloat16, "float32")])
@pytest.mark.parametrize("family", OTHER_MIXTURES)
def test_rounded_mixtures_keep_routers_in_the_dtype_of_rows(
    tmp_path: Path, family: str, stored: torch.dtype, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start compares a pass with the stock model, whose router and gate of shared experts are layers too."""
    monkeypatch.setenv("OUTRIDER_CACHE_GIB", "0")  # no start is remembered
    write_family(tmp_path, OTHER_MIXTURES[family]()).to(stored).save_pretrained(tmp_path)
    ModelRunner(ModelConfig(str(tmp_path), dtype, "cpu", Quantization.INT4), CacheConfig(num_blocks=2))


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_pass_needs_no_file(tmp_path: Path, family: str, is_deterministic: bool) -> None:
    write_family(tmp_path, SERVED[family]()).half().save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = stock(torch.tensor([TEXT])).logits[0]
    config = ModelConfig(str(tmp_path), "float32", "cpu", deterministic=is_deterministic)
    runner = ModelRunner(config, CacheConfig(num_blocks=2))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    logits = runner.forward([Span(TEXT, 0, [0], len(TEXT))])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_loaded_weights_are_views_of_their_file(tmp_path: Path) -> None:
    write_family(tmp_path, SERVED["llama"]()).bfloat16().save_pretrained(tmp_path)
    model = load_model(ModelConfig(str(tmp_path), "float32", "cpu"), keeps_dtype=FusedDecoder.fits_config)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert str(tmp_path) in Path("/proc/self/maps").read_text()


def test_experts_stay_in_their_files_until_they_are_packed(tmp_path: Path) -> None:
    stock = write_family(tmp_path, SERVED["mixtral"]()).bfloat16()
    stock.save_pretrained(tmp_path)
    model = load_model(ModelConfig(str(tmp_path), "float32", "cpu"), keeps_dtype=lambda config: True)
    for name, weight in stock.named_parameters():
        loaded = model.get_parameter(name)
        assert isinstance(loaded, UnreadWeight) == ("experts" in name)
        assert torch.equal(read_weight(loaded), weight)


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_experts_that_are_not_finite_are_refused_by_name(tmp_path: Path, quantization: str) -> None:
    stock = write_family(tmp_path, SERVED["qwen3_moe"]()).bfloat16()
    with torch.no_grad():
        stock.get_parameter("model.layers.1.mlp.experts.down_proj")[2, 3, 4] = torch.nan
    stock.save_pretrained(tmp_path)
    config = ModelConfig(str(tmp_path), "float32", "cpu", Quantization(quantization))
    with pytest.raises(ConfigError, match=r"1 of 4096 values of 'model.layers.1.mlp.experts.down_proj'.* are NaN"):
        ModelRunner(config, CacheConfig(num_blocks=2))


def test_dropped_pages_are_read_again(tmp_path: Path) -> None:
    numbers = torch.arange(8 << 20, dtype=torch.int32)
    file = tmp_path / "numbers"
    file.write_bytes(numbers.numpy().tobytes())
    mapped = torch.from_file(str(file), size=numbers.numel(), dtype=torch.int32)
    assert torch.equal(mapped, numbers)
    resident = resident_bytes()
    drop_pages([mapped])
    assert resident - resident_bytes() > mapped.nbytes // 2
    assert torch.equal(mapped, numbers)


def test_memory_of_no_file_keeps_its_numbers() -> None:
    numbers = torch.arange(1 << 20)
    drop_pages([numbers])
    assert torch.equal(numbers, torch.arange(1 << 20))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

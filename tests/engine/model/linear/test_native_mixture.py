"""One call computes a stock mixture: its scores, biases, groups, factors and shared MLP; no row depends on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GraniteMoeConfig,
    HYV3Config,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from engine.config import Quantization
from engine.model.decoders.decoder_family import FAMILIES
from engine.model.linear.gated_linear import gated_of
from engine.model.linear.native_mixture import NativeMixture
from engine.model.linear.packed_experts import pack_experts
from engine.model.linear.quantized_linear import linear_factory
from tests.engine.fixtures.native_kernels import needs_float_kernels

pytestmark = [needs_float_kernels, pytest.mark.usefixtures("any_instructions")]
HIDDEN = 64
SIZES = {
    **{"vocab_size": 96, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": None},
}
PLAIN = {name: size for name, size in SIZES.items() if name != "head_dim"}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "first_k_dense_replace": 0}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=3),
    "olmoe": lambda: OlmoeConfig(**PLAIN, num_experts=8, num_experts_per_tok=3),
    "qwen2_moe": lambda: Qwen2MoeConfig(**PLAIN, **EXPERTS, shared_expert_intermediate_size=64, decoder_sparse_step=1),
    "dots1": lambda: Dots1Config(**SIZES, **ROUTED, **GROUPS, n_shared_experts=1, norm_topk_prob=True),
    "glm4_moe": lambda: Glm4MoeConfig(**SIZES, **ROUTED, **GROUPS, norm_topk_prob=False),
    "hy_v3": lambda: HYV3Config(**SIZES, **EXPERTS, mlp_layer_types=["sparse"]),
    "minimax_m2": lambda: MiniMaxM2Config(**SIZES, num_local_experts=8, num_experts_per_tok=3),
    "afmoe": lambda: AfmoeConfig(**SIZES, **EXPERTS, num_shared_experts=1, num_dense_layers=0, route_scale=1.7),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(
        **PLAIN, moe_num_experts=8, moe_k=3, moe_intermediate_size=96, moe_layer_start_index=0
    ),
    "granitemoe": lambda: GraniteMoeConfig(**PLAIN, num_local_experts=8, num_experts_per_tok=3),
    "lfm2_moe": lambda: Lfm2MoeConfig(**PLAIN, **EXPERTS, num_dense_layers=0, layer_types=["full_attention"]),
}
WITH_BIASES = {"dots1", "glm4_moe", "hy_v3", "minimax_m2", "afmoe", "ernie4_5_moe", "lfm2_moe"}


def stock_model(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).eval().requires_grad_(False)
    for name, numbers in (*model.named_parameters(), *model.named_buffers()):
        if numbers.is_floating_point() and "inv_freq" not in name:
            numbers.copy_(torch.randn(numbers.shape).mul_(0.2).bfloat16())
    return model


def mixture_of(model: Any) -> Any:
    [mixture] = [each for each in model.modules() if hasattr(each, "experts") and not hasattr(each, "self_attn")]
    return mixture


def native(model: Any, quantization: Quantization = Quantization.NONE) -> NativeMixture:
    mixture, make_linear = mixture_of(model), linear_factory(quantization, torch.float32)
    pack_experts(model, make_linear)
    mlp = getattr(mixture, "shared_expert", None) or getattr(mixture, "shared_experts", None)
    shared = None
    if mlp is not None:
        down: nn.Linear = mlp.down_proj
        shared = gated_of(mlp.gate_proj, mlp.up_proj, make_linear), make_linear(down.weight, down.bias)
    routing = FAMILIES[model.config.model_type].routing
    assert routing is not None
    assert NativeMixture.fits(mixture)
    assert shared is None or all(NativeMixture.takes(mixture, each) for each in shared)
    return NativeMixture(mixture, routing, shared)


def rows_of(num_rows: int) -> Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(num_rows))


@torch.inference_mode()
@pytest.mark.parametrize("family", CONFIGS)
def test_a_mixture_is_the_stock_one(family: str) -> None:
    model, rows = stock_model(family), rows_of(300)
    result = mixture_of(model)(rows[None])
    expected = (result[0] if isinstance(result, tuple) else result).view(rows.shape)
    torch.testing.assert_close(native(model)(rows), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("family", sorted(WITH_BIASES))
def test_biases_choose_experts(family: str) -> None:
    """Without them others are chosen: the comparison above sees them."""
    rows, unlike = rows_of(300), stock_model(family)
    for name, numbers in (*unlike.named_parameters(), *unlike.named_buffers()):
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            numbers.zero_()
    found = native(stock_model(family))(rows)
    assert float((native(unlike)(rows) - found).norm()) > 0.1 * float(found.norm())


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen2_moe", "dots1", "lfm2_moe"])
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT4])
def test_a_row_does_not_depend_on_the_rows_beside_it(family: str, quantization: Quantization) -> None:
    mixture, rows = native(stock_model(family), quantization), rows_of(1500)  # more than one turn
    together = mixture(rows)
    for first, last in ((0, 1), (7, 8), (1499, 1500), (3, 20), (100, 300), (1300, 1400)):
        assert torch.equal(mixture(rows[first:last]), together[first:last])

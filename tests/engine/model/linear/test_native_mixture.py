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
    Cohere2MoeConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    HYV3Config,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from engine.config import Quantization
from engine.model.decoders.families import FAMILIES
from engine.model.linear.gated_linear import gated_of
from engine.model.linear.native_mixture import NativeMixture
from engine.model.linear.native_product import Gate
from engine.model.linear.packed_experts import pack_experts
from engine.model.linear.packed_linear import Linear
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
COHERE = {"num_experts": 8, "num_experts_per_tok": 3}
NEMOTRON = {
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "pad_token_id": None},
    **{"layers_block_type": ["moe"], "moe_shared_expert_intermediate_size": 64},
}
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
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, num_local_experts=8, num_experts_per_tok=3, swiglu_limit=1.5, swiglu_alpha=1.3
    ),
    "cohere2_moe": lambda: Cohere2MoeConfig(**SIZES, **COHERE, num_shared_experts=2, norm_topk_prob=False),
    "cohere2_moe of sums": lambda: Cohere2MoeConfig(
        **SIZES, **COHERE, num_shared_experts=1, shared_expert_combination_strategy="sum"
    ),
    "cohere2_moe of sigmoids": lambda: Cohere2MoeConfig(**SIZES, **COHERE, expert_selection_fn="sigmoid"),
    "cohere2_moe of sums of sigmoids": lambda: Cohere2MoeConfig(
        **SIZES, **COHERE, expert_selection_fn="sigmoid", norm_topk_prob=False
    ),
    "phimoe": lambda: PhimoeConfig(**PLAIN, num_local_experts=8, num_experts_per_tok=2, router_jitter_noise=0.3),
    "phimoe of one more": lambda: PhimoeConfig(**PLAIN, num_local_experts=8, num_experts_per_tok=3),
    "nemotron_h": lambda: NemotronHConfig(**NEMOTRON, **GROUPS),
    "nemotron_h in a latent space": lambda: NemotronHConfig(**NEMOTRON, moe_latent_size=32, mlp_bias=True),
}
WITH_BIASES = {"gpt_oss", "nemotron_h", "dots1", "glm4_moe", "hy_v3", "minimax_m2", "afmoe", "ernie4_5_moe", "lfm2_moe"}


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
    family = FAMILIES[model.config.model_type]

    def packed(linear: nn.Linear) -> Linear:
        return make_linear(linear.weight, linear.bias)

    shared = latent = None
    if mlp is not None:
        inner = gated_of(mlp.gate_proj, mlp.up_proj, make_linear) if family.is_gated else packed(mlp.up_proj)
        shared = inner, packed(mlp.down_proj)
    if isinstance(getattr(mixture, "fc1_latent_proj", None), nn.Linear):
        latent = packed(mixture.fc1_latent_proj), packed(mixture.fc2_latent_proj)
    assert family.routing is not None
    assert NativeMixture.fits(mixture)
    assert all(NativeMixture.takes(mixture, each) for each in (*(shared or ()), *(latent or ())))
    function = Gate.NONE if family.is_gated else family.function(model.config)
    return NativeMixture(mixture, family.routing, shared, function, latent)


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
        if name.endswith(("e_score_correction_bias", "expert_bias", "router.bias")):
            numbers.zero_()
    found = native(stock_model(family))(rows)
    assert float((native(unlike)(rows) - found).norm()) > 0.1 * float(found.norm())


@torch.inference_mode()
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3])
def test_of_equal_experts_a_sparse_mixer_takes_the_first(noise: float) -> None:
    """Logits are small integers: many are equal, 0, negative, or as far from the best as they may be."""
    model = stock_model("phimoe")
    mixture = mixture_of(model)
    mixture.router.router_jitter_noise = noise
    mixture.router.weight.zero_()
    mixture.router.weight[:, :3] = torch.eye(3)[torch.arange(8) % 3]
    rows = rows_of(400)
    rows[:, :3] = torch.randint(-3, 4, (400, 3), generator=torch.Generator().manual_seed(0)).float()
    expected = mixture(rows[None])[0]
    torch.testing.assert_close(native(model)(rows), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(
    "family", ["qwen2_moe", "dots1", "lfm2_moe", "gpt_oss", "phimoe", "nemotron_h in a latent space"]
)
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT4])
def test_a_row_does_not_depend_on_the_rows_beside_it(family: str, quantization: Quantization) -> None:
    mixture, rows = native(stock_model(family), quantization), rows_of(1500)  # more than one turn
    together = mixture(rows)
    for first, last in ((0, 1), (7, 8), (1499, 1500), (3, 20), (100, 300), (1300, 1400)):
        assert torch.equal(mixture(rows[first:last]), together[first:last])

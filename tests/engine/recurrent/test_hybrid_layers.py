"""One call for all layers, recurrent ones among them, gives the bits of calls one by one, in any company."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Mamba2Config,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from engine.attention.native import native_or_torch
from engine.batch.span import Span, SpanStates
from engine.config import Quantization
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.native_layers import NativeLayers
from engine.model.forward_batch import ForwardBatch
from engine.model.linear.native_mixture import NativeMixture
from engine.model.paged_model import PagedModel
from engine.recurrent.native_mixer import NativeMixer
from tests.engine.fixtures.native_kernels import needs_float_kernels

pytestmark = [needs_float_kernels, pytest.mark.usefixtures("any_instructions")]
SIZES = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "pad_token_id": None},
}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 24, "mamba_n_groups": 2}
LAYERS = ["mamba", "attention", "mamba"]
HEADS_OF_FOUR = {"mamba_n_heads": 32, "mamba_d_head": 4, "mamba_d_state": 24, "mamba_n_groups": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MULTIPLIERS = {
    **{"lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6},
    **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.4},
    **{"ssm_out_multiplier": 0.6, "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8]},
}
DELTA = {
    **{"linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}
NEMOTRON_EXPERTS = {
    **{**SIZES, "num_hidden_layers": 3},
    **{"head_dim": 32, "mamba_num_heads": 32, "mamba_head_dim": 4, "ssm_state_size": 24, "n_groups": 2},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1},
    **{"layers_block_type": ["mamba", "moe", "attention"], "moe_shared_expert_intermediate_size": 64},
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"], conv_bias=True),
    "lfm3": Lfm3Config(
        **SIZES, head_dim=32, sliding_window=9, layer_types=["conv", "sliding_attention", "full_attention"]
    ),
    "bamba": BambaConfig(**{**SIZES, "hidden_size": 128}, **{**MAMBA, "mamba_n_heads": 32}, attn_layer_indices=[1]),
    "granite": GraniteMoeHybridConfig(
        **SIZES,
        **MAMBA,
        layer_types=LAYERS,
        num_local_experts=0,
        shared_intermediate_size=96,
        residual_multiplier=0.3,
        embedding_multiplier=3.0,
    ),
    "mamba2": Mamba2Config(
        **{"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 32, "head_dim": 4},
        **{"state_size": 24, "n_groups": 2, "bos_token_id": None, "pad_token_id": None, "eos_token_id": 0},
    ),
    "nemotron_h": NemotronHConfig(
        **{**SIZES, "num_hidden_layers": 5},
        layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"],
        head_dim=32,
        mamba_num_heads=32,
        mamba_head_dim=4,
        ssm_state_size=24,
        n_groups=2,
    ),
    "falcon_h1": FalconH1Config(**SIZES, **HEADS_OF_FOUR, **MULTIPLIERS, mamba_d_ssm=128),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **DELTA),
    "granite with experts": GraniteMoeHybridConfig(
        **SIZES, **MAMBA, layer_types=LAYERS, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64
    ),
    "lfm2_moe": Lfm2MoeConfig(**SIZES, **EXPERTS, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1),
    "qwen3_next": Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SIZES, **DELTA, **EXPERTS, shared_expert_intermediate_size=64),
    "nemotron_h with experts": NemotronHConfig(**NEMOTRON_EXPERTS),
    "nemotron_h with experts in a latent space": NemotronHConfig(**NEMOTRON_EXPERTS, moe_latent_size=32),
}
TEXT = torch.randint(3, 96, (240,), generator=torch.Generator().manual_seed(1)).tolist()
FIRST_TABLE, SECOND_TABLE = list(range(20, 0, -1)), [21, 22]
BEGINNING = [Span(TEXT[:150], 0, FIRST_TABLE, 1, states=SpanStates(0, {150: 1}))]
NEXT = Span(TEXT[150:153], 150, FIRST_TABLE, 3, states=SpanStates(1, {1: 2, 3: 3}))
BESIDE = Span(TEXT[200:203], 0, SECOND_TABLE, 3, states=SpanStates(0, {3: 4}))


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    """Float32 models whose weights are numbers of bfloat16."""
    found = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 else 0.5, std=0.2)
            parameter.data = parameter.data.bfloat16().float()
        found[name] = model.requires_grad_(False)
    return found


def paged(model: PreTrainedModel, dtype: torch.dtype, quantization: Quantization = Quantization.NONE) -> PagedModel:
    return PagedModel(copy.deepcopy(model).to(dtype), quantization, native_or_torch)


def logits(model: PagedModel, spans: list[Span]) -> tuple[Tensor, list[Tensor]]:
    """Logits of `spans` after the beginning of the text, and the states."""
    cache = model.new_cache(24, 16, num_states=6)
    model.forward(ForwardBatch.of(BEGINNING, cache, native_or_torch))
    found = model.forward(ForwardBatch.of(spans, cache, native_or_torch)).clone()
    assert cache.states is not None
    return found, [*cache.states.rows, *(each for each in cache.states.matrices if each is not None)]


def one_by_one(model: PagedModel, spans: list[Span]) -> tuple[Tensor, list[Tensor]]:
    with patch.object(NativeLayers, "take", return_value=False):
        return logits(model, spans)


def assert_one_call(model: PagedModel) -> None:
    with (
        patch.object(FusedDecoder, "_attend", side_effect=AssertionError),
        patch.object(NativeMixer, "__call__", side_effect=AssertionError),
        patch.object(NativeMixture, "__call__", side_effect=AssertionError),
    ):
        logits(model, [NEXT])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT4])
def test_one_call_has_the_bits_of_many(
    models: dict[str, PreTrainedModel], name: str, dtype: torch.dtype, quantization: Quantization
) -> None:
    model = paged(models[name], dtype, quantization)
    is_one_call = quantization is Quantization.INT4 or "granite" not in name  # whose 336 outputs are not whole tiles
    if is_one_call:
        assert_one_call(model)
    (together, states), (apart, expected) = logits(model, [NEXT, BESIDE]), one_by_one(model, [NEXT, BESIDE])
    assert torch.equal(together, apart)
    assert all(map(torch.equal, states, expected))
    if is_one_call:
        assert torch.equal(together, torch.cat((logits(model, [NEXT])[0], logits(model, [BESIDE])[0])))


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_logits_are_transformers(models: dict[str, PreTrainedModel], name: str) -> None:
    expected = models[name](torch.tensor([TEXT[:153]]), use_cache=False).logits[0, 150:]
    found, _ = logits(paged(models[name], torch.float32), [NEXT])
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    assert float(((found - expected).norm(dim=-1) / spread).max()) < 1e-5


@pytest.mark.parametrize("compute", [logits, one_by_one])
@pytest.mark.parametrize("name", ["lfm2", "mamba2", "nemotron_h", "falcon_h1", "qwen3_5"])
def test_rows_without_logits_leave_their_states(
    models: dict[str, PreTrainedModel], name: str, compute: Callable[..., tuple[Tensor, list[Tensor]]]
) -> None:
    model = paged(models[name], torch.float32)
    (everything, states), (some, left) = (
        compute(model, [NEXT, BESIDE]),
        compute(model, [NEXT._replace(num_logits=1), BESIDE]),
    )
    assert torch.equal(some, everything[2:])
    assert all(map(torch.equal, states, left))

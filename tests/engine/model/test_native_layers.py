"""One call for all layers gives the bits of the kernels called one by one, in any company, for every kind of weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    AriaTextConfig,
    AutoModelForCausalLM,
    AXK1Config,
    BioGptConfig,
    BitNetConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    CTRLConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FlexOlmoConfig,
    FlintConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    HYV3Config,
    IQuestCoderConfig,
    Jais2Config,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NanoChatConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
    YoutuConfig,
)

from engine.attention.native import native_or_torch
from engine.attention.torch_attention import TorchAttention
from engine.batch.span import Span
from engine.config import KVDtype, Quantization
from engine.model.decoders.families import rotaries
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.native_layers import NativeLayers
from engine.model.decoders.rotary import RotaryTable
from engine.model.forward_batch import NO_TAPS, ForwardBatch, HiddenStateTaps
from engine.model.linear.native_mixture import NativeMixture
from engine.model.paged_model import PagedModel
from tests.engine.fixtures.families import write_family
from tests.engine.fixtures.native_kernels import needs_float_kernels

pytestmark = [needs_float_kernels, pytest.mark.usefixtures("any_instructions")]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
SIZES_OF_TWO_HEADS = {name: size for name, size in SIZES.items() if name != "head_dim"}
SIZES_OF_TWO_HEADS |= {"num_attention_heads": 2, "num_key_value_heads": 1}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
PART_ROTATED = {**HALF_ROTATED, "partial_rotary_factor": 0.4}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SIZES_OF_NEOX = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
SIZES_OF_NEOX |= {"hidden_size": 128, "num_attention_heads": 2, "rope_parameters": HALF_ROTATED}
SCALED_QUERIES = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
GPT = {"vocab_size": 96, "n_embd": 128, "n_layer": 3, "n_head": 2, "n_positions": 512}
LATENT = {name: size for name, size in SIZES.items() if name != "head_dim"}
LATENT |= {"num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 128, "qk_nope_head_dim": 32}
LATENT |= {"qk_rope_head_dim": 32, "v_head_dim": 64}
IN_GROUPS = ROUTED | {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 1}
GEMMA_4 = {
    **SIZES,
    "num_hidden_layers": 5,
    "global_head_dim": 64,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 96,
    "final_logit_softcapping": 5.0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=9),
    "qwen2": Qwen2Config(**{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1]),
    "phi3": Phi3Config(**{**SIZES, "head_dim": 64}, rope_parameters=HALF_ROTATED),
    "granite": GraniteConfig(
        **SIZES_OF_TWO_HEADS,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "smollm3": SmolLM3Config(**SIZES_OF_TWO_HEADS, no_rope_layer_interval=2),
    "gemma": GemmaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, **WINDOWS, final_logit_softcapping=5.0),
    "gemma3_text": Gemma3TextConfig(**SIZES, **WINDOWS),
    "gemma4_text": Gemma4TextConfig(
        **SIZES,
        sliding_window=9,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=5.0,
    ),
    "flint": FlintConfig(**SIZES, **WINDOWS, **EXPERTS, shared_expert_intermediate_size=64, mlp_only_layers=[0]),
    "hunyuan_v1_dense": HunYuanDenseV1Config(**SIZES),
    "hunyuan_v1_moe": HunYuanMoEV1Config(**SIZES, num_experts=4, moe_topk=2),
    "bitnet": BitNetConfig(**SIZES_OF_TWO_HEADS),
    "ernie4_5": Ernie4_5Config(**SIZES_OF_TWO_HEADS),
    "glm": GlmConfig(**{**SIZES, "head_dim": 64}, rope_parameters=HALF_ROTATED, attention_bias=True),
    "glm4": Glm4Config(**{**SIZES, "head_dim": 64}, rope_parameters=HALF_ROTATED),
    "cohere": CohereConfig(**SIZES_OF_TWO_HEADS),
    "cohere2": Cohere2Config(**SIZES_OF_TWO_HEADS, **WINDOWS, logit_scale=0.5),
    "olmo2": Olmo2Config(**SIZES_OF_TWO_HEADS),
    "olmo3": Olmo3Config(**SIZES_OF_TWO_HEADS, **WINDOWS),
    "exaone4": Exaone4Config(**SIZES, **WINDOWS),
    "helium": HeliumConfig(**SIZES_OF_TWO_HEADS | {"head_dim": 32}),
    "iquestcoder": IQuestCoderConfig(**SIZES),
    "vaultgemma": VaultGemmaConfig(**SIZES, **WINDOWS, final_logit_softcapping=5.0),
    "hyperclovax": HyperCLOVAXConfig(**SIZES_OF_TWO_HEADS, residual_multiplier=0.3, logits_scaling=2.0),
    "olmo": OlmoConfig(**SIZES_OF_TWO_HEADS),
    "arcee": ArceeConfig(**SIZES),
    "jais2": Jais2Config(**SIZES),
    "olmoe": OlmoeConfig(**SIZES_OF_TWO_HEADS, num_experts=4, num_experts_per_tok=2),
    "dots1": Dots1Config(**SIZES, **ROUTED, n_shared_experts=1, first_k_dense_replace=1),
    "glm4_moe": Glm4MoeConfig(**SIZES | {"head_dim": 64}, **ROUTED, first_k_dense_replace=1, use_qk_norm=True),
    "hy_v3": HYV3Config(**SIZES, **EXPERTS, mlp_layer_types=["dense", "sparse", "sparse"]),
    "minimax_m2": MiniMaxM2Config(**SIZES, num_local_experts=4, num_experts_per_tok=2, rotary_dim=32),
    "solar_open": SolarOpenConfig(**SIZES, **ROUTED),
    "ernie4_5_moe": Ernie4_5_MoeConfig(**SIZES_OF_TWO_HEADS, moe_num_experts=4, moe_k=2, moe_intermediate_size=64),
    "exaone_moe": ExaoneMoeConfig(**SIZES, **EXPERTS, **WINDOWS, mlp_layer_types=["dense", "sparse", "sparse"]),
    "flex_olmo": FlexOlmoConfig(**SIZES_OF_TWO_HEADS, num_experts=4, num_experts_per_tok=2),
    "phimoe": PhimoeConfig(**SIZES_OF_TWO_HEADS, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": GraniteMoeConfig(**SIZES_OF_TWO_HEADS, num_local_experts=4, num_experts_per_tok=2),
    "granitemoeshared": GraniteMoeSharedConfig(
        **SIZES_OF_TWO_HEADS, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES_OF_TWO_HEADS, **EXPERTS, shared_expert_intermediate_size=64, mlp_only_layers=[1]
    ),
    "aria_text": AriaTextConfig(**SIZES, moe_num_experts=4, moe_topk=2),
    "cohere2_moe": Cohere2MoeConfig(
        **SIZES,
        **WINDOWS,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        mlp_layer_types=["dense", "sparse", "sparse"],
        prefix_dense_intermediate_size=96,
    ),
    "gpt_oss": GptOssConfig(**SIZES, **WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "starcoder2": Starcoder2Config(**SIZES_OF_TWO_HEADS, sliding_window=9),
    "phi": PhiConfig(**SIZES_OF_TWO_HEADS | {"hidden_size": 160}, rope_parameters=PART_ROTATED),
    "gemma4_e2b": Gemma4TextConfig(**GEMMA_4, num_kv_shared_layers=3, use_double_wide_mlp=True),
    "gemma4_a4b": Gemma4TextConfig(
        **GEMMA_4, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=64
    ),
    "gpt_neox": GPTNeoXConfig(**SIZES_OF_NEOX),
    "gpt_neox_quarter": GPTNeoXConfig(**{**SIZES_OF_NEOX, "rope_parameters": None}),
    "gpt_neox_in_turn": GPTNeoXConfig(**SIZES_OF_NEOX, use_parallel_residual=False),
    "persimmon": PersimmonConfig(**SIZES_OF_NEOX),
    "stablelm": StableLmConfig(**SIZES_OF_TWO_HEADS | {"hidden_size": 128}, rope_parameters=HALF_ROTATED),
    "stablelm_parallel": StableLmConfig(
        **SIZES_OF_TWO_HEADS | {"hidden_size": 128}, rope_parameters=HALF_ROTATED, use_parallel_residual=True
    ),
    "nemotron": NemotronConfig(**SIZES | {"head_dim": 64}, rope_parameters=HALF_ROTATED),
    "apertus": ApertusConfig(**SIZES),
    "nanochat": NanoChatConfig(**SIZES),
    "ministral3": Ministral3Config(**SIZES, rope_parameters={**SCALED_QUERIES, "llama_4_scaling_beta": 0.5}),
    "afmoe": AfmoeConfig(
        **SIZES,
        **WINDOWS,
        **EXPERTS | {"num_experts": 4},
        num_shared_experts=1,
        num_dense_layers=1,
        mup_enabled=True,
    ),
    "granite_swa": GraniteSWAConfig(**SIZES_OF_TWO_HEADS, **WINDOWS, layer_rope_theta=[1e4, 0, 100.0]),
    "granitemoe_swa": GraniteMoeSWAConfig(
        **SIZES_OF_TWO_HEADS,
        **WINDOWS,
        layer_rope_theta=[0, 1e4, 1e4],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    "mimo_v2_flash": MiMoV2FlashConfig(
        **SIZES | {"head_dim": 48},
        **WINDOWS,
        **ROUTED,
        v_head_dim=32,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "gpt2": GPT2Config(**GPT, scale_attn_by_inverse_layer_idx=True),
    "gpt_bigcode": GPTBigCodeConfig(**GPT),
    "gpt_bigcode_by_heads": GPTBigCodeConfig(**GPT, multi_query=False),
    "ctrl": CTRLConfig(**GPT, dff=96),
    "biogpt": BioGptConfig(**SIZES_OF_NEOX),
    "opt": OPTConfig(**SIZES_OF_NEOX, ffn_dim=96, word_embed_proj_dim=128),
    "minicpm3": MiniCPM3Config(**LATENT, rms_norm_eps=1e-2),
    "youtu": YoutuConfig(**LATENT),
    "youtu_plain": YoutuConfig(**LATENT | {"q_lora_rank": None}, rope_interleave=False),
    "deepseek_v2": DeepseekV2Config(
        **LATENT, **IN_GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=2.0, first_k_dense_replace=1
    ),
    "deepseek_v2_lite": DeepseekV2Config(
        **LATENT | {"q_lora_rank": None}, **IN_GROUPS, topk_method="greedy", first_k_dense_replace=0
    ),
    "deepseek_v3": DeepseekV3Config(
        **LATENT, **IN_GROUPS, first_k_dense_replace=1, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(**LATENT, **ROUTED, n_shared_experts=1),
    "axk1": AXK1Config(**LATENT, **IN_GROUPS),
    "cohere_normed": CohereConfig(**SIZES_OF_TWO_HEADS, use_qk_norm=True),
    "phi_normed": PhiConfig(
        **SIZES_OF_TWO_HEADS | {"hidden_size": 160}, rope_parameters=PART_ROTATED, qk_layernorm=True
    ),
}
WITH_PARTS_OF_THEIR_OWN = ("gemma4_e2b", "gemma4_a4b", "gpt_neox", "gpt_neox_in_turn", "persimmon", "stablelm_parallel")
WITH_PARTS_OF_THEIR_OWN += ("minicpm3", "youtu", "youtu_plain", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
WITH_PARTS_OF_THEIR_OWN += ("glm4_moe_lite", "axk1", "granite_swa", "granitemoe_swa")
WITH_PARTS_OF_THEIR_OWN += ("mimo_v2_flash", "gpt2", "gpt_bigcode", "gpt_bigcode_by_heads", "biogpt", "ctrl", "opt")
WITH_PARTS_OF_THEIR_OWN += ("nemotron", "apertus", "nanochat", "ministral3", "afmoe", "cohere_normed", "phi_normed")
WITH_PARTS_OF_THEIR_OWN += ("bitnet", "hunyuan_v1_dense", "hunyuan_v1_moe", "flint")
TEXT = torch.randint(3, 96, (240,), generator=torch.Generator().manual_seed(1)).tolist()
FIRST_TABLE, SECOND_TABLE = list(range(20, 0, -1)), [21, 22]
BEGINNING = [Span(TEXT[:150], 0, FIRST_TABLE, 1)]  # more rows than the MLP takes at a time
BRANCHED = Span([TEXT[150], 7, TEXT[151], 9, TEXT[152]], 150, FIRST_TABLE, 5, (-1, 0, 0, 1, 2))
BESIDE = Span(TEXT[200:203], 0, SECOND_TABLE, 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    """Float32 models whose weights are numbers of bfloat16, biases and norms too; no bias is zero."""
    root = tmp_path_factory.mktemp("models")
    found = {name: write_family(root / name, config) for name, config in CONFIGS.items()}
    for model in found.values():
        with torch.no_grad():
            for layer in model.modules():
                if hasattr(layer, "layer_scalar"):
                    layer.layer_scalar.fill_(0.75)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
                parameter.copy_(parameter.bfloat16())
    return found


def paged(
    model: PreTrainedModel,
    dtype: torch.dtype = torch.bfloat16,
    quantization: Quantization = Quantization.NONE,
    taps: HiddenStateTaps = NO_TAPS,
) -> PagedModel:
    """`model` with our attention; its decoder has all layers in one call."""
    return PagedModel(copy.deepcopy(model).to(dtype), quantization, native_or_torch, taps)


def logits(model: PagedModel, spans: list[Span], kind: KVDtype = KVDtype.AUTO) -> Tensor:
    """Logits of `spans` after the beginning of the text."""
    cache = model.new_cache(24, 16, kind=kind)
    model.forward(ForwardBatch.of(BEGINNING, cache, native_or_torch))
    return model.forward(ForwardBatch.of(spans, cache, native_or_torch)).clone()


def one_by_one(model: PagedModel, spans: list[Span], kind: KVDtype = KVDtype.AUTO) -> Tensor:
    with patch.object(NativeLayers, "take", return_value=False):
        return logits(model, spans, kind)


def is_one_call(model: PagedModel) -> bool:
    cache = model.new_cache(2, 16)
    batch = ForwardBatch.of([Span([5], 0, [0], 1)], cache, native_or_torch)
    with patch.object(FusedDecoder, "_attend", side_effect=AssertionError):
        try:
            model.forward(batch)
        except AssertionError:
            return False
    return True


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.bfloat16, Quantization.NONE),
        (torch.float32, Quantization.NONE),
        (torch.bfloat16, Quantization.INT8),
        (torch.float32, Quantization.INT8),
        (torch.bfloat16, Quantization.INT4),
        (torch.float32, Quantization.INT4),
    ],
)
def test_one_call_has_the_bits_of_many(
    models: dict[str, PreTrainedModel], family: str, dtype: torch.dtype, quantization: Quantization
) -> None:
    model = paged(models[family], dtype, quantization)
    assert is_one_call(model)
    native: Any = model.decoder._native_layers  # type: ignore[union-attr]
    assert len(list(native.parts(range(CONFIGS[family].num_hidden_layers)))) == 1
    together = logits(model, [BRANCHED, BESIDE])
    assert torch.equal(together, one_by_one(model, [BRANCHED, BESIDE]))
    assert torch.equal(together, torch.cat((logits(model, [BRANCHED]), logits(model, [BESIDE]))))


@pytest.mark.parametrize(
    ("family", "is_packed"),
    [
        (family, True)
        for family in ("llama", "gemma4_text", "gpt_oss", "cohere2_moe", "phimoe", *WITH_PARTS_OF_THEIR_OWN)
    ]
    + [("gemma4_text", False), ("gemma4_e2b", False)],
)
@torch.inference_mode()
def test_logits_in_one_call_are_transformers(models: dict[str, PreTrainedModel], family: str, is_packed: bool) -> None:
    """An MLP has a call of its own where bfloat16 cannot hold its weights."""
    stock = copy.deepcopy(models[family])
    if not is_packed:
        stock.model.layers[0].mlp.gate_proj.weight.mul_(1.001)
    stock.set_attn_implementation("eager")
    expected = stock(torch.tensor([TEXT[:153]]), use_cache=False).logits[0, 150:]
    found = logits(paged(stock, torch.float32), [Span(TEXT[150:153], 150, FIRST_TABLE, 3)])
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    assert float(((found - expected).norm(dim=-1) / spread).max()) < 1e-5


def test_the_gate_of_shared_experts_has_no_rest_that_torch_rounds_otherwise(models: dict[str, PreTrainedModel]) -> None:
    with patch.object(NativeMixture, "fits", return_value=False):
        decoder: Any = paged(models["qwen2_moe"], torch.float32).decoder
    mixture = decoder._layers[0].mlp.args[0]
    assert mixture.shared_expert_gate(torch.zeros(3, 64)).shape == (3, 64)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_rotary_tables_have_the_dtype_of_rows(family: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.bfloat16)
    for rotary in rotaries(model).values():
        table = RotaryTable(rotary, torch.empty(0, dtype=torch.bfloat16))
        batch = Mock(num_positions=3, position_ids=torch.arange(3))
        assert table.at(batch).dtype is torch.bfloat16


@DTYPES
def test_an_int8_pool_is_written_and_read_in_the_call(models: dict[str, PreTrainedModel], dtype: torch.dtype) -> None:
    model = paged(models["llama"], dtype)
    found = logits(model, [BESIDE, BRANCHED], KVDtype.INT8)
    assert torch.equal(found, one_by_one(model, [BESIDE, BRANCHED], KVDtype.INT8))
    assert not torch.equal(found, logits(model, [BESIDE, BRANCHED]))


@DTYPES
@pytest.mark.parametrize("compute", [logits, one_by_one])
@pytest.mark.parametrize("family", ["qwen3", "gemma4_e2b", "gemma4_a4b", "afmoe", "deepseek_v3"])
def test_rows_without_logits_leave_nothing_but_their_keys_and_values(
    models: dict[str, PreTrainedModel], family: str, dtype: torch.dtype, compute: Callable[..., Tensor]
) -> None:
    """Of the last layer only rows with logits go past the attention: they and what follows stay the same."""
    model = paged(models[family], dtype)
    chunk = Span(TEXT[150:170], 150, FIRST_TABLE, 20)
    everything = compute(model, [chunk, BESIDE])
    wanted = torch.cat((everything[17:20], everything[-1:]))
    assert torch.equal(compute(model, [chunk._replace(num_logits=3), BESIDE._replace(num_logits=1)]), wanted)
    assert compute(model, [chunk._replace(num_logits=0)]).shape[0] == 0
    cache = model.new_cache(24, 16)
    for span in (*BEGINNING, chunk._replace(num_logits=0)):
        model.forward(ForwardBatch.of([span], cache, native_or_torch))
    behind = Span(TEXT[170:171], 170, FIRST_TABLE, 1)
    found = model.forward(ForwardBatch.of([behind], cache, native_or_torch))
    assert torch.equal(found, compute(model, [Span(TEXT[150:171], 150, FIRST_TABLE, 1)]))


@DTYPES
def test_layers_that_share_keys_and_values_compute_rows_with_logits_alone(
    models: dict[str, PreTrainedModel], dtype: torch.dtype
) -> None:
    model = paged(models["gemma4_e2b"], dtype)
    expected = logits(model, [BRANCHED, BESIDE])
    found: list[tuple[range, int]] = []
    run = NativeLayers.run

    def noted(self: NativeLayers, hidden: Tensor, *arguments: Any) -> Any:
        found.append((arguments[3], len(hidden)))
        return run(self, hidden, *arguments)

    with patch.object(NativeLayers, "run", noted):
        some = logits(model, [BRANCHED._replace(num_logits=4), BESIDE._replace(num_logits=0)])
    assert torch.equal(some, expected[1:5])
    assert found == [(range(2), 150), (range(2, 5), 1), (range(2), 8), (range(2, 5), 4)]


@DTYPES
def test_tapped_states_are_those_between_the_layers(models: dict[str, PreTrainedModel], dtype: torch.dtype) -> None:
    model = paged(models["qwen3"], dtype, taps=HiddenStateTaps((0, 2, 3), is_final=True))
    found, features = logits(model, [BESIDE]), model.features
    expected, expected_features = one_by_one(model, [BESIDE]), model.features
    assert features is not None
    assert expected_features is not None
    assert torch.equal(found, expected)
    assert torch.equal(features, expected_features)
    assert torch.equal(found, logits(paged(models["qwen3"], dtype), [BESIDE]))


def test_rows_that_a_kernel_does_not_take_go_one_by_one(models: dict[str, PreTrainedModel]) -> None:
    model = paged(models["llama"], torch.float32)
    cache = model.new_cache(2, 16)
    with patch.object(NativeLayers, "run", side_effect=AssertionError):
        model.forward(ForwardBatch.of([Span([5], 0, [0], 1)], cache, TorchAttention))

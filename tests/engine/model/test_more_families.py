"""Every family of the list in docs/checkpoints.md, in a few random layers: its logits equal transformers'.

Sizes are cut by the names of a configuration's fields, so that a family needs no lines of its own here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3Config,
    Gemma4Config,
    Gemma4TextConfig,
    GraniteConfig,
    LlavaNextConfig,
    Mistral3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from engine.batch.span import Span
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.stock_decoder import StockDecoder
from engine.model.forward_batch import ForwardBatch
from engine.model.paged_model import PagedModel
from tests.engine.fixtures.families import EXPERTS, PLAIN, SERVED
from tests.engine.fixtures.families import GEMMA_4 as E2B

DOCS = Path(__file__).parents[3] / "docs" / "checkpoints.md"
_LISTED = DOCS.read_text(encoding="utf-8").partition("model types, compared")[2].partition("\n\n")[0]
_ROWS = re.findall(r"^\| ([^|]*) \| ([\w, ]+) \|", _LISTED, re.M)
DECODERS = {  # by family and row
    name: StockDecoder if path.startswith("module by module") else FusedDecoder
    for path, row in _ROWS
    for name in row.split(", ")
}
FAMILIES = list(DECODERS)
VOCAB_SIZE = 96
LENGTH = 60
WINDOW = 6
SIZES: dict[str, int | None] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "dff", "shared_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_experts"), 4),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "n_group", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("moe_topk", "zero_expert_num", "num_layers"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("q_lora_rank", "qk_head_dim"), 16),
    "ffn_hidden_size": 64,
    "v_head_dim": 12,
    "sliding_window": WINDOW,
    "pad_token_id": None,
}
# Its heads differ by layer, so it takes all sizes at once.
GEMMA_4 = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16},
    **{"hidden_size_per_layer_input": 0, "max_position_embeddings": 128, "pad_token_id": None},
    **{"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGES = {**_TINY, "image_size": 28, "patch_size": 14}
# Rotary angles for time, height and width, which texts have alike.
_IN_THREE = PLAIN | {
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
_TOWER = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 16, "num_heads": 2}
_TOWER |= {"out_hidden_size": 32, "patch_size": 14, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
# Configurations of families of the list with parts that the list's own do not have, or within models of several media.
VARIANTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma4_text with shared keys and inputs of layers": SERVED["gemma4_text"],
    "gemma4_text with experts": lambda: Gemma4TextConfig(**GEMMA_4 | _EXPERTS),
    "gemma4_text with experts and inputs of layers": lambda: Gemma4TextConfig(
        **GEMMA_4 | _EXPERTS | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=Gemma4TextConfig(**E2B | {"pad_token_id": 0}), vision_config=_IMAGES, audio_config=None
    ),
    "gemma3": lambda: Gemma3Config(text_config=small_config("gemma3_text"), vision_config=_IMAGES),
    "mistral3": lambda: Mistral3Config(text_config=small_config("ministral3"), vision_config=_IMAGES),
    "qwen2_vl": lambda: Qwen2VLConfig(text_config=_IN_THREE, vision_config=_TOWER | {"hidden_size": 32}),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(text_config=_IN_THREE, vision_config=_TOWER),
    "qwen3_vl": lambda: Qwen3VLConfig(text_config=_IN_THREE, vision_config=_TOWER),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(text_config=_IN_THREE | EXPERTS, vision_config=_TOWER),
    "cohere with norms of heads": lambda: CohereConfig(**PLAIN, use_qk_norm=True),
    "phi with norms of heads": lambda: PhiConfig(**PLAIN, qk_layernorm=True),
    "granite_swa of three thetas": lambda: small_config("granite_swa", layer_rope_theta=[1e4, 0, 100.0, 1e3]),
    "gpt_bigcode with a key per query": lambda: small_config("gpt_bigcode", multi_query=False),
    "gpt_neox in turn": lambda: small_config("gpt_neox", use_parallel_residual=False),
    "stablelm in parallel": lambda: small_config("stablelm", use_parallel_residual=True),
}
WITHOUT_HEAD_DIM = ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")  # whose layers need one
_OPTIONAL = ("head_dim", "q_lora_rank", "sliding_window")  # None stays None


def small_config(family: str, **more: object) -> PreTrainedConfig:
    if family == "gemma4_text":
        return AutoConfig.for_model(family, **GEMMA_4)
    if family in WITHOUT_HEAD_DIM:
        more["head_dim"] = SIZES["head_dim"]
    return sized(AutoConfig.for_model(family, **more), SIZES)


def sized(config: Any, sizes: Mapping[str, int | None]) -> PreTrainedConfig:
    """Give a family's configuration sizes by the names of its fields; it has as many layers of the same kinds."""
    for name, size in sizes.items():
        if name not in config.attribute_map and hasattr(config, name):
            present = getattr(config, name)
            if (present is None and name in _OPTIONAL) or not isinstance(present, int | float | None):
                continue
            setattr(config, name, size)
    if hasattr(config, "kv_lora_rank"):
        config.num_key_value_heads = config.num_attention_heads
    num_layers = sizes["num_hidden_layers"]
    assert num_layers is not None
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) > num_layers and name.endswith(("types", "layers", "type")):
            setattr(config, name, [*value[: num_layers // 2], *value[-(num_layers // 2) :]])
    made: PreTrainedConfig = config
    return made


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_chunks_beside_another_sequence_are_the_stock_models(family: str) -> None:
    compare(random_model(small_config(family)), DECODERS[family])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_more_configurations_are_the_stock_models(variant: str) -> None:
    compare(random_model(VARIANTS[variant]()), FusedDecoder)


def test_a_model_of_a_described_family_with_other_parts_goes_module_by_module() -> None:
    """As OPT-350m, whose norms follow the sums."""
    compare(random_model(small_config("opt", do_layer_norm_before=False)), StockDecoder)


def test_a_model_around_a_text_part_that_multiplies_its_logits_goes_module_by_module() -> None:
    """As LLaVA-NeXT around Granite, which does not multiply them."""
    text = GraniteConfig(**PLAIN, logits_scaling=4.0)
    vision = {**_IMAGES, "model_type": "clip_vision_model"}
    compare(random_model(LlavaNextConfig(text_config=text, vision_config=vision)), StockDecoder)


@pytest.mark.parametrize("family", ["gemma4_text", "cohere2"])
def test_logits_by_stock_modules_are_the_stock_models(family: str) -> None:
    """As several ranks and GPUs compute them, over the same pool: layers that share keys and values have one place."""
    model = random_model(SERVED[family]())
    with patch.object(FusedDecoder, "fits", return_value=False):
        compare(model, StockDecoder)
        shapes = PagedModel(copy.deepcopy(model)).layer_shapes
    assert shapes == PagedModel(model).layer_shapes
    assert len(shapes) == 2


@torch.inference_mode()
def compare(model: PreTrainedModel, decoder: type) -> None:
    """Compare the logits of two texts, and the class of the decoder."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (LENGTH, LENGTH // 2)]
    expected = [model(torch.tensor([text]), use_cache=False).logits[0] for text in texts]
    paged = PagedModel(copy.deepcopy(model))
    assert type(paged.decoder) is decoder
    cache = paged.new_cache(num_blocks=8, block_size=16)
    begun = Span(texts[0][:41], 0, list(range(4)), 41)
    rest = [Span(texts[1], 0, [4, 5], LENGTH // 2), Span(texts[0][41:], 41, list(range(4)), LENGTH - 41)]
    first = paged.forward(ForwardBatch.of([begun], cache)).clone()
    second, last = paged.forward(ForwardBatch.of(rest, cache)).split([LENGTH // 2, LENGTH - 41])
    for found, wanted in zip((torch.cat((first, last)), second), expected, strict=True):
        spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1)
        assert float(((found - wanted).norm(dim=-1) / spread).max()) < 1e-5


def test_the_list_is_found() -> None:
    assert len(FAMILIES) > 60

"""Every family of the list in docs/checkpoints.md, in a few random layers: its logits equal transformers'.

Sizes are cut by the names of a configuration's fields, so that a family needs no lines of its own here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.batch.span import Span
from engine.model.forward_batch import ForwardBatch
from engine.model.paged_model import PagedModel

DOCS = Path(__file__).parents[3] / "docs" / "checkpoints.md"
_LISTED = DOCS.read_text(encoding="utf-8").partition("model types, compared")[2].partition("\n\n")[0]
FAMILIES = [name for row in re.findall(r"^\| [^|]* \| ([\w, ]+) \|", _LISTED, re.M) for name in row.split(", ")]
VOCAB_SIZE = 96
LENGTH = 60
WINDOW = 6
SIZES: dict[str, int | None] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "shared_intermediate_size", "ffn_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_experts"), 4),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "n_group", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("moe_topk", "zero_expert_num", "num_layers"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("q_lora_rank", "qk_head_dim"), 16),
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
_OPTIONAL = ("head_dim", "q_lora_rank", "sliding_window")  # None stays None


def small_config(family: str) -> PreTrainedConfig:
    if family == "gemma4_text":
        return AutoConfig.for_model(family, **GEMMA_4)
    return sized(AutoConfig.for_model(family), SIZES)


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
@torch.inference_mode()
def test_logits_of_chunks_beside_another_sequence_are_the_stock_models(family: str) -> None:
    model = random_model(small_config(family))
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (LENGTH, LENGTH // 2)]
    expected = [model(torch.tensor([text]), use_cache=False).logits[0] for text in texts]
    paged = PagedModel(copy.deepcopy(model))
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

"""Families that run through transformers' modules, sharded by its plans: tokens, logits and blocks of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import (
    AutoConfig,
    CohereConfig,
    DeepseekV2Config,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    Llama4TextConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.tensor_parallel import check_divisible
from protos.errors import ConfigError
from tests.engine.fixtures.families import LATENT, PLAIN, SERVED, VOCAB_SIZE, WINDOW, write_family
from tests.engine.fixtures.pairs.rank_pair import Computed, compute_alone, compute_sharded

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
_NEOX_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}

HEADS_SHARDED: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma2": lambda: Gemma2Config(**{**PLAIN, "vocab_size": VOCAB_SIZE + 1}, head_dim=8, sliding_window=WINDOW),
    "gemma3_text": SERVED["gemma3_text"],
    "phi": SERVED["phi"],  # biases, its own names
    "granite": lambda: GraniteConfig(**PLAIN, attention_bias=True),
    "starcoder2": lambda: Starcoder2Config(**PLAIN, sliding_window=WINDOW),
    "gpt_neox": lambda: GPTNeoXConfig(vocab_size=VOCAB_SIZE, **_NEOX_SIZES),  # q, k and v of a head side by side
    "mixtral": SERVED["mixtral"],
    "qwen3_moe": lambda: Qwen3MoeConfig(**{**PLAIN, **_EXPERTS, "head_dim": 8}),
    "deepseek_v2": lambda: DeepseekV2Config(**{**PLAIN, **LATENT}),
    "granite_swa": lambda: AutoConfig.for_model("granite_swa", **PLAIN, sliding_window=WINDOW),  # sinks
}
HEADS_WHOLE: dict[str, Callable[[], PreTrainedConfig]] = {
    "phi3": lambda: Phi3Config(**PLAIN, sliding_window=WINDOW),
    "olmo2": lambda: Olmo2Config(**PLAIN),
    "deepseek_v3": SERVED["deepseek_v3"],
}
UNFIT: dict[str, Callable[[], PreTrainedConfig]] = {
    "cohere": lambda: CohereConfig(**PLAIN, use_qk_norm=True),  # a norm per head, which the plan forgets
}
SHARDED = {**HEADS_SHARDED, **HEADS_WHOLE}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for family, config in {**SHARDED, **UNFIT}.items():
        write_family(root / family, config())
    return {family: root / family for family in (*SHARDED, *UNFIT)}


@pytest.fixture(scope="module")
def computed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Computed | str]:
    return compute_sharded(folders, tmp_path_factory.mktemp("meeting"))


@pytest.mark.parametrize("family", SHARDED)
def test_two_ranks_compute_what_one_device_does(
    family: str, folders: dict[str, Path], computed: dict[str, Computed | str]
) -> None:
    alone, sharded = compute_alone(folders[family]), computed[family]
    assert isinstance(sharded, Computed), sharded
    assert sharded.texts == alone.texts
    if family.startswith("deepseek"):  # one rank keeps latents, several keep keys and values
        with patch.object(FusedDecoder, "fits", return_value=False):
            alone = compute_alone(folders[family])
    torch.testing.assert_close(sharded.logits, alone.logits, rtol=0, atol=2e-5)
    blocks = [each.blocks.view(torch.float32) for each in (sharded, alone)]
    torch.testing.assert_close(*blocks, rtol=0, atol=1e-5)
    assert torch.equal(sharded.read_back, sharded.blocks)
    assert sharded.num_blocks == alone.num_blocks // (1 if family in HEADS_SHARDED else 2)


def test_a_plan_that_does_not_fit_its_family_is_noticed_by_all_ranks(computed: dict[str, Computed | str]) -> None:
    refusal = computed["cohere"]
    assert isinstance(refusal, str)
    assert "tensor_parallel_size is 2, but model type 'cohere' runs on one device: its modules do not" in refusal
    assert refusal.endswith("non-singleton dimension 2); set it to 1")


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_families_without_a_plan_are_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match=f"model type '{family}' runs on one device: transformers has no plan"):
        check_divisible(SERVED[family](), 2)


def test_plans_that_need_more_than_is_done_are_refused_with_their_entry() -> None:
    config = Llama4TextConfig(**PLAIN, head_dim=8, num_local_experts=4, intermediate_size_mlp=64)
    with pytest.raises(ConfigError, match=r"'llama4_text' .*experts\.gate_up_proj, a parameter, by 'packed_rowwise'"):
        check_divisible(config, 2)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (SERVED["gemma2"](), 4, "num_key_value_heads 2; choose one of 1, 2$"),
        (MixtralConfig(**{**PLAIN, "intermediate_size": 65}), 2, "gate_up_proj of width 65.*choose one of 1$"),
        (Phi3Config(**{**PLAIN, "intermediate_size": 66}), 4, r"down_proj of width 66.*choose one of 1, 2$"),
    ],
)
def test_widths_that_the_ranks_do_not_divide_are_refused_with_sizes_that_do(
    config: PreTrainedConfig, size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divisible(config, size)

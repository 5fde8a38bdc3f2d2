"""Tiny random checkpoints of many model families, written from their configurations alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    StableLmConfig,
)

VOCAB_SIZE = 96
NUM_POSITIONS = 128
WINDOW = 6  # of the families with sliding windows: shorter than the tests' contexts

PLAIN = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": NUM_POSITIONS,
    "pad_token_id": None,
}
_GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4}
_OPT_SIZES = {"ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}
_BART_SIZES = {"d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
_DELTA_NET = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**PLAIN),
    "qwen2": lambda: Qwen2Config(**PLAIN),
    "qwen3": lambda: Qwen3Config(**PLAIN, head_dim=8),
    "mistral": lambda: MistralConfig(**PLAIN, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**PLAIN, head_dim=8, sliding_window=WINDOW),
    "gemma3_text": lambda: Gemma3TextConfig(**PLAIN, head_dim=8, sliding_window=WINDOW),
    "phi": lambda: PhiConfig(**PLAIN),
    "gpt2": lambda: GPT2Config(**_GPT, n_positions=NUM_POSITIONS),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, max_position_embeddings=NUM_POSITIONS, **_OPT_SIZES
    ),
    "mixtral": lambda: MixtralConfig(**PLAIN, num_local_experts=4),
    "gpt_oss": lambda: GptOssConfig(**PLAIN, head_dim=8, num_local_experts=4, sliding_window=WINDOW),
    "cohere2": lambda: Cohere2Config(**PLAIN, sliding_window=WINDOW, logit_scale=1.0),
    "deepseek_v3": lambda: DeepseekV3Config(**{**PLAIN, **LATENT}),
}

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "falcon": lambda: FalconConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "bloom": lambda: BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4),
    "gptj": lambda: GPTJConfig(**_GPT, n_positions=NUM_POSITIONS, rotary_dim=4),  # none of these use the interface
    "stablelm": lambda: StableLmConfig(**PLAIN),  # drops the keyword
    "mamba": lambda: MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=8),
    "qwen3_next": lambda: Qwen3NextConfig(**PLAIN, **_DELTA_NET),  # recurrent layers beside attention
    "bart": lambda: BartConfig(vocab_size=VOCAB_SIZE, **_BART_SIZES),  # counts rows instead of reading positions
}


def write_family(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Save a float32 model with random weights to `folder`; returns it with stock attention, as a reference.

    Weights are wide enough that logits are steep and that attention is far from uniform.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model

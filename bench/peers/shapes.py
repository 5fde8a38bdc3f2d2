"""Checkpoints of random weights in published shapes, for what does not depend on the weights: steps, starts, memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from bench.padded_pair import CACHE

_SHARED = {"tie_word_embeddings": True, "max_position_embeddings": 32_768}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
    },
    "qwen3-moe-0.9b": {
        "model_type": "qwen3_moe",
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
}


def random_checkpoint(name: str) -> Path:
    """Return the folder of a shape with random weights in bfloat16, made under `CACHE` on the first call."""
    folder = CACHE / name
    if any(folder.glob("*.safetensors")):  # written last
        return folder
    shape = dict(SHAPES[name])
    end = int(shape["vocab_size"]) - 1
    config = AutoConfig.for_model(shape.pop("model_type"), **_SHARED, **shape, bos_token_id=end, eos_token_id=end)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(0 if parameter_name.endswith("bias") else 1)
        else:
            parameter.data.normal_(0, 0.02, generator=generator)
    model.tie_weights()
    _tokenizer(end + 1).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def _tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and numbered words, as many as the shape has tokens; its last one ends a text."""
    tokens = [*sorted(ByteLevel.alphabet()), "ab"]
    tokens += [f"w{number}" for number in range(num_tokens - len(tokens) - 1)] + ["<|endoftext|>"]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, [("a", "b")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def random_prompts(name: str, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Return prompts of random words."""
    generator = torch.Generator().manual_seed(num_tokens)
    high = int(SHAPES[name]["vocab_size"]) - 1
    rows: list[list[int]] = torch.randint(300, high, (num_prompts, num_tokens), generator=generator).tolist()
    return rows

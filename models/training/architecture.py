"""The two Llamas of the demo pair: their shapes, initial weights and hidden states in training.

The target is deep and narrow on purpose: at this size the layers determine the cost of a step, so a two-layer draft is
cheap.
"""

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from models.training.tokenizer import END_OF_TEXT, END_OF_TURN, MAX_CONTEXT_TOKENS, SPECIAL_TOKENS, VOCAB_SIZE

REPETITION_PENALTY = 1.2  # for generation_config.json: small models fall into loops on their own text
END_OF_TEXT_ID, END_OF_TURN_ID = map(SPECIAL_TOKENS.index, (END_OF_TEXT, END_OF_TURN))


def llama_config(num_layers: int, hidden_size: int, mlp_size: int, num_heads: int, num_kv_heads: int) -> LlamaConfig:
    """Return a Llama over the demo vocabulary with heads of 64 and tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=mlp_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    return config


def target_config() -> LlamaConfig:
    """12 layers of width 256: 10.5 M parameters."""
    return llama_config(num_layers=12, hidden_size=256, mlp_size=768, num_heads=4, num_kv_heads=2)


def draft_config() -> LlamaConfig:
    """2 layers of width 128: 1.0 M parameters; four heads, because so small a model mostly copies."""
    return llama_config(num_layers=2, hidden_size=128, mlp_size=384, num_heads=4, num_kv_heads=2)


def new_model(config: LlamaConfig, seed: int, device: torch.device | None = None) -> LlamaForCausalLM:
    """Return a fresh float32 model; the last projection of each branch is zero, so a layer starts as identity."""
    torch.manual_seed(seed)
    with device or torch.device("cpu"):
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def hidden_states(model: LlamaForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the normed last hidden states [B, T, hidden] under plain causal attention.

    `positions` [B, T] may skip (`tokens.skipped_positions`); LlamaModel.forward would treat a skip as the border of a
    document.
    """
    trunk = model.model
    hidden = trunk.embed_tokens(ids)  # [B, T, hidden]
    position_embeddings = trunk.rotary_emb(hidden, position_ids=positions)
    for layer in trunk.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=position_embeddings)
    normed: Tensor = trunk.norm(hidden)
    return normed


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compile the decoder layer once for all layers of the model; each new shape is traced again."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def num_parameters(model: LlamaForCausalLM) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def save_checkpoint(model: LlamaForCausalLM, folder: Path, repetition_penalty: float | None = None) -> None:
    """Write a bfloat16 copy of the model into `folder`, with these sampling defaults.

    The model itself keeps its dtype.
    """
    rounded = LlamaForCausalLM(copy.deepcopy(model.config)).bfloat16()
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=[END_OF_TEXT_ID, END_OF_TURN_ID],
        pad_token_id=END_OF_TEXT_ID,
        repetition_penalty=repetition_penalty,
    )
    folder.mkdir(parents=True, exist_ok=True)
    rounded.save_pretrained(folder)


def load_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> LlamaForCausalLM:
    """Return the model saved in `folder`, in evaluation mode."""
    with device or torch.device("cpu"):
        loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        return loaded

"""The demo pair at the shape of large models, its logits unchanged except for rounding: every width is padded too.

    hidden      the trained numbers, then a small constant c, then zeros. A norm over more numbers is smaller by a known
                factor, which its weight and its epsilon compensate
    heads       dimension i of a head of D is at i * (D' / D) in each half of a head of D', where the rotary frequency
                is the same; queries are scaled by sqrt(D' / D) because scores are divided by sqrt(D')
    MLP, heads, layers   beyond the trained ones are random, and their outputs are multiplied by zero
    vocabulary  tokens beyond the trained ones have logits far below zero: their row reads c with a large minus weight

The work is a large model's and the acceptance a real pair's. Built where it is needed, never committed.
"""

from __future__ import annotations

import copy
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.padded_pair import plain_generation_config, spread
from models.training.architecture import load_checkpoint


@dataclass(frozen=True, slots=True)
class WideShape:
    """The sizes of a Llama."""

    hidden_size: int
    num_layers: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_positions: int = 16_384


LLAMA_3_8B = WideShape(4096, 32, 14_336, 32, 8, 128, 128_256)
LLAMA_3_1B = WideShape(2048, 16, 8192, 32, 8, 64, 128_256)


def build_wide_fixture(
    source: Path, out: Path, shape: WideShape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Widen the checkpoint in `source` on `device` and writes it into `out`, with the tokenizer."""
    widen_model(load_checkpoint(source, torch.float32, device), shape, dtype).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, out / name)


@torch.no_grad()
def widen_model(trained: LlamaForCausalLM, shape: WideShape, dtype: torch.dtype, seed: int = 0) -> LlamaForCausalLM:
    """Return a model of this shape with the logits of `trained` for the trained tokens.

    Raises ValueError if any size of the shape is smaller than the trained one, or its heads are no multiple.
    """
    _check(trained.config, shape)
    wide = _filler_model(trained, shape, dtype, seed)
    widening = _Widening(shape_of(trained.config), shape)
    widening.copy_ends(trained, wide)
    layers: Any = wide.model.layers
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for place, index in enumerate(spread(trained.config.num_hidden_layers, shape.num_layers)):
        if index is not None:
            widening.copy_layer(trained.model.layers[index], layers[place])
    wide.generation_config = plain_generation_config(trained)
    loaded: LlamaForCausalLM = wide.eval()
    return loaded


def _check(config: LlamaConfig, shape: WideShape) -> None:
    trained = shape_of(config)
    names = ("num_layers", "mlp_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    small = [name for name in names if getattr(shape, name) < getattr(trained, name)]
    small += ["hidden_size"] if shape.hidden_size <= trained.hidden_size else []
    if small or shape.head_dim % trained.head_dim:
        raise ValueError(f"{shape} does not hold {trained}: {', '.join(small) or 'head_dim is no multiple'}")
    if shape.num_heads // shape.num_kv_heads < trained.num_heads // trained.num_kv_heads:
        raise ValueError(f"{shape} has fewer query heads per kv head than {trained}")


def shape_of(config: LlamaConfig) -> WideShape:
    """Return the sizes that a configuration names."""
    numbers = (
        config.hidden_size,
        config.num_hidden_layers,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.vocab_size,
        config.max_position_embeddings,
    )
    return WideShape(*(int(number) for number in numbers if number is not None))


def _filler_model(trained: LlamaForCausalLM, shape: WideShape, dtype: torch.dtype, seed: int) -> LlamaForCausalLM:
    config = copy.deepcopy(trained.config)
    config.hidden_size, config.num_hidden_layers = shape.hidden_size, shape.num_layers
    config.intermediate_size, config.vocab_size = shape.mlp_size, shape.vocab_size
    config.num_attention_heads, config.num_key_value_heads = shape.num_heads, shape.num_kv_heads
    config.head_dim, config.max_position_embeddings = shape.head_dim, shape.num_positions
    config.rms_norm_eps = trained.config.rms_norm_eps * trained.config.hidden_size / shape.hidden_size
    config.tie_word_embeddings, config.initializer_range = False, 0.02
    config.dtype = dtype
    torch.manual_seed(seed)
    with trained.device:
        loaded: LlamaForCausalLM = LlamaForCausalLM._from_config(config, dtype=dtype)
        return loaded


class _Widening:
    """The place of each trained number."""

    def __init__(self, trained: WideShape, shape: WideShape) -> None:
        self._trained = trained
        self._shape = shape
        self._norm_scale = math.sqrt(trained.hidden_size / shape.hidden_size)
        stride, half = shape.head_dim // trained.head_dim, trained.head_dim // 2
        first = [stride * index for index in range(half)]
        self._head_places = first + [shape.head_dim // 2 + place for place in first]

    def copy_ends(self, trained: LlamaForCausalLM, wide: LlamaForCausalLM) -> None:
        num_tokens, size = self._trained.vocab_size, self._trained.hidden_size
        embedding, head = wide.model.embed_tokens.weight, wide.lm_head.weight
        embedding[:num_tokens] = 0
        embedding[:num_tokens, :size] = trained.model.embed_tokens.weight.to(embedding.dtype)
        embedding[:, size] = 2.0**-8  # its square is negligible next to the trained numbers'
        head.zero_()
        head[:num_tokens, :size] = trained.lm_head.weight.to(head.dtype)
        head[num_tokens:, size] = -(2.0**22)  # times c over the norm of the last hidden state: some -500 logits
        self._copy_norm(trained.model.norm.weight, wide.model.norm.weight)
        wide.model.norm.weight[size] = 1

    def copy_layer(self, trained: Any, wide: Any) -> None:
        for name in ("input_layernorm", "post_attention_layernorm"):
            self._copy_norm(getattr(trained, name).weight, getattr(wide, name).weight)
        mine, its = wide.self_attn, trained.self_attn
        scale = math.sqrt(self._shape.head_dim / self._trained.head_dim)
        self._copy_heads(its.q_proj.weight * scale, mine.q_proj.weight, self._query_heads())
        self._copy_heads(its.k_proj.weight, mine.k_proj.weight, range(self._trained.num_kv_heads))
        self._copy_heads(its.v_proj.weight, mine.v_proj.weight, range(self._trained.num_kv_heads))
        rows = self._rows(self._query_heads()).to(mine.o_proj.weight.device)
        size = self._trained.hidden_size
        mine.o_proj.weight[:size, rows] = its.o_proj.weight.to(mine.o_proj.weight.dtype)
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight, new = getattr(trained.mlp, name).weight, getattr(wide.mlp, name).weight
            new[: weight.shape[0], : weight.shape[1]] = weight.to(new.dtype)

    def _query_heads(self) -> list[int]:
        """Return the place of each trained query head: with its kv head."""
        trained = self._trained.num_heads // self._trained.num_kv_heads
        wide = self._shape.num_heads // self._shape.num_kv_heads
        return [head // trained * wide + head % trained for head in range(self._trained.num_heads)]

    def _rows(self, heads: list[int] | range) -> Tensor:
        return torch.tensor([head * self._shape.head_dim + place for head in heads for place in self._head_places])

    def _copy_heads(self, weight: Tensor, wide: Tensor, heads: list[int] | range) -> None:
        """Rows of a projection to heads: dimensions between the trained ones are zero."""
        for head in heads:
            wide[head * self._shape.head_dim : (head + 1) * self._shape.head_dim] = 0
        block = torch.zeros(len(weight), wide.shape[1], dtype=wide.dtype, device=wide.device)
        block[:, : weight.shape[1]] = weight.to(wide.dtype)
        wide[self._rows(heads).to(wide.device)] = block

    def _copy_norm(self, weight: Tensor, wide: Tensor) -> None:
        wide.zero_()
        wide[: len(weight)] = (weight * self._norm_scale).to(wide.dtype)

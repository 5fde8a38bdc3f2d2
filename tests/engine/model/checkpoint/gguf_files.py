"""A small Llama as a GGUF file with a different block type for each linear layer, and its exact weights.

`write_model` makes one of any family's model, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFValueType, GGUFWriter, get_tensor_name_map
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.engine.model.checkpoint.gguf_blocks import BLOCKS, random_blocks

NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 4, 2, 64
LINEAR = {
    "attn_q": ("self_attn.q_proj", HEADS * HEAD_DIM),
    "attn_k": ("self_attn.k_proj", KV_HEADS * HEAD_DIM),
    "attn_v": ("self_attn.v_proj", KV_HEADS * HEAD_DIM),
    "attn_output": ("self_attn.o_proj", HIDDEN),
    "ffn_gate": ("mlp.gate_proj", HIDDEN),
    "ffn_up": ("mlp.up_proj", HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN),
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOKENS = [*bytes_to_unicode().values(), "he", "<s>", "</s>"]

Metadata = Mapping[str, object]  # a value of None leaves the key out


def write_model(path: Path, architecture: str, model: PreTrainedModel, metadata: Metadata) -> None:
    """Write a model as a file, whose `metadata` is given without the architecture's name."""
    writer = GGUFWriter(path, architecture)
    add_tokenizer(writer)
    set_metadata(writer, {f"{architecture}.{key}": value for key, value in metadata.items()})
    kind = next(each for each, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight.numpy())
    finish(writer)


def write_mixture(path: Path, model: PreTrainedModel, metadata: Metadata) -> dict[str, np.ndarray]:
    """Write a Qwen3-MoE with experts of Q8_0 blocks; return its experts in transformers' names and layout."""
    writer, random, expected = GGUFWriter(path, "qwen3moe"), np.random.default_rng(3), {}
    add_tokenizer(writer)
    set_metadata(writer, {f"qwen3moe.{key}": value for key, value in metadata.items()})
    kind = next(each for each, name in MODEL_ARCH_NAMES.items() if name == "qwen3moe")
    names, block = get_tensor_name_map(kind, model.config.num_hidden_layers), GGMLQuantizationType(BLOCKS["Q8_0"][0])
    for name, weight in model.state_dict().items():
        if weight.ndim < 3:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight.numpy())
            continue
        layer, last = name.split(".")[2], name.rpartition(".")[2]
        parts = ["gate", "up"] if last == "gate_up_proj" else ["down"]
        num_experts, num_outputs, num_inputs = weight.shape
        numbers = []
        for part in parts:
            rows = num_experts * num_outputs // len(parts)
            data, values = random_blocks("Q8_0", rows, num_inputs, random)
            writer.add_tensor(
                f"blk.{layer}.ffn_{part}_exps.weight", data.reshape(num_experts, -1, data.shape[-1]), raw_dtype=block
            )
            numbers.append(values.reshape(num_experts, -1, num_inputs))
        expected[name] = np.concatenate(numbers, axis=1)
    finish(writer)
    return expected


def set_metadata(writer: GGUFWriter, metadata: Metadata) -> None:
    for key, value in metadata.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))


def add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 3])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(len(TOKENS) - 2)
    writer.add_eos_token_id(len(TOKENS) - 1)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass
class GgufFile:
    """A file to be written; `expected` are its weights in transformers' names and layout, float32."""

    path: Path
    architecture: str = "llama"
    is_tied: bool = False
    template: str | None = TEMPLATE
    rope_divisors: np.ndarray | None = None
    left_out: str = ""
    metadata: Metadata = field(default_factory=dict)  # overrides the file's own values
    expected: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self) -> GgufFile:
        self._writer = GGUFWriter(self.path, self.architecture)
        self._random = np.random.default_rng(3)
        self._metadata()
        self._tokenizer()
        set_metadata(self._writer, self.metadata)
        self._matrix("token_embd", "model.embed_tokens", len(TOKENS), "Q8_0")
        kinds = cycle(BLOCKS)
        for layer in range(NUM_LAYERS):
            for name, (module, rows) in LINEAR.items():
                self._matrix(f"blk.{layer}.{name}", f"model.layers.{layer}.{module}", rows, next(kinds))
            for name, module in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
                self._vector(f"blk.{layer}.{name}", f"model.layers.{layer}.{module}")
        self._vector("output_norm", "model.norm")
        if not self.is_tied:
            self._matrix("output", "lm_head", len(TOKENS), "Q6_K")
        if self.rope_divisors is not None:
            self._writer.add_tensor("rope_freqs.weight", self.rope_divisors.astype(np.float32))
        finish(self._writer)
        return self

    def _metadata(self) -> None:
        writer = self._writer
        writer.add_name("tiny")
        writer.add_block_count(NUM_LAYERS)
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(HIDDEN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_vocab_size(len(TOKENS))

    def _tokenizer(self) -> None:
        add_tokenizer(self._writer)
        if self.template is not None:
            self._writer.add_chat_template(self.template)

    def _matrix(self, name: str, module: str, rows: int, kind: str) -> None:
        data, numbers = random_blocks(kind, rows, HIDDEN, self._random)
        if name.endswith(("attn_q", "attn_k")):  # llama.cpp has the two halves of each head interleaved
            numbers = numbers.reshape(-1, HEAD_DIM // 2, 2, HIDDEN).swapaxes(1, 2).reshape(rows, HIDDEN)
        self.expected[f"{module}.weight"] = numbers
        if name != self.left_out:
            self._writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType(BLOCKS[kind][0]))

    def _vector(self, name: str, module: str) -> None:
        numbers = self._random.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
        self.expected[f"{module}.weight"] = numbers
        self._writer.add_tensor(f"{name}.weight", numbers)

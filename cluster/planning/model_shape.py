"""The sizes of a model that decide its cost: from its config.json, without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.planning.tables import entry_of
from protos.errors import ConfigError

_BYTES = {"float32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0625, "int4": 0.625}  # int8 by 64, int4 by 32 inputs


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Layers, widths and heads of a model, and the dtype of its weights; experts are 1 of 1 in a dense one."""

    name: str
    dtype: str
    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_tied_head: bool
    num_experts: int
    num_experts_per_token: int

    @classmethod
    def of(cls, model: str, dtype: str) -> ModelShape:
        """Return the shape of a folder, a config.json, or a public model by name.

        Raises:
            ConfigError: there is no such model, its file is not read, or the dtype is unknown.
        """
        if dtype not in _BYTES:
            raise ConfigError(f"dtype {dtype!r} is unknown; use one of {', '.join(_BYTES)}")
        config = _read_config(model)
        config = config.get("text_config", config)
        try:
            return cls(
                name=model,
                dtype=dtype,
                num_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                mlp_size=config.get("moe_intermediate_size") or config["intermediate_size"],
                num_heads=config["num_attention_heads"],
                num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                vocab_size=config["vocab_size"],
                has_tied_head=bool(config.get("tie_word_embeddings", False)),
                num_experts=config.get("num_experts") or config.get("num_local_experts") or 1,
                num_experts_per_token=config.get("num_experts_per_tok") or 1,
            )
        except KeyError as error:
            raise ConfigError(
                f"the config of {model!r} has no {error}; a plan needs a Llama-like config.json"
            ) from error

    @property
    def bytes_per_weight(self) -> float:
        return _BYTES[self.dtype]

    @property
    def _attention_weights(self) -> float:
        width = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * self.hidden_size * width

    @property
    def _expert_weights(self) -> float:
        """Weights of one expert of every layer."""
        return self.num_layers * 3.0 * self.hidden_size * self.mlp_size

    @property
    def _head_weights(self) -> float:
        return float(self.hidden_size * self.vocab_size)

    @property
    def num_weights(self) -> float:
        """All weights; norms, biases and routers are left out."""
        tables = self._head_weights * (1 if self.has_tied_head else 2)
        return self._attention_weights + self.num_experts * self._expert_weights + tables

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in memory."""
        return self.num_weights * self.bytes_per_weight

    def read_bytes(self, num_rows: int) -> float:
        """Return the bytes of weights that a pass of so many rows reads: of experts those that a row goes through."""
        share = 1.0 - (1.0 - self.num_experts_per_token / self.num_experts) ** num_rows
        experts = self.num_experts * share * self._expert_weights
        return (self._attention_weights + experts + self._head_weights) * self.bytes_per_weight

    @property
    def row_flops(self) -> float:
        """Operations of one row without attention: two per weight that it meets."""
        return 2 * (self._attention_weights + self.num_experts_per_token * self._expert_weights + self._head_weights)

    @property
    def attention_flops(self) -> float:
        """Operations of one row per token of its context."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values per token, in bfloat16 (float32 where the weights are)."""
        return 2.0 * self.num_layers * self.num_kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)


def _read_config(model: str) -> dict[str, Any]:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        return entry_of("shapes", model, "or give a folder or a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not read: {error}; give a model's config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; give a model's config.json")
    return config

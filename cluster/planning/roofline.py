"""The sizes of a model that set its cost, and the seconds of a pass: bytes over bandwidth, operations over speed.

The larger of both if a device reads and computes at the same time, else their sum.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from engine.config import MTP_KEYS
from engine.model.checkpoint.weight_files import read_config, read_mapping
from protos.errors import ConfigError

_FOLDER = Path(__file__).parent
_BYTES = {"float32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0625, "int4": 0.625}  # of a weight; scales by 64 and 32
_RECURRENT = ("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_state", "ssm_state_size", "state_size")


def read_table(name: str) -> dict[str, dict[str, Any]]:
    """Return the table `name` ("hardware" or "shapes")."""
    table: dict[str, dict[str, Any]] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return table


def entry_of(name: str, key: str, hint: str) -> dict[str, Any]:
    """Return an entry of a table by its key; `hint` names an alternative.

    Raises:
        ConfigError: there is no such entry.
    """
    table = read_table(name)
    if key.lower() not in table:
        raise ConfigError(f"{key!r} is not in the table of {name}: {', '.join(sorted(table))}; {hint}")
    return table[key.lower()]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Layers, widths and heads of a model, and the dtype of its weights; a dense model has 1 expert of 1."""

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
    num_mtp_layers: int = 1  # if it has any
    latent_size: int = 0  # numbers of a token that one processor caches in place of keys and values, in each layer
    expanded_size: int = 0  # of these keys and values

    @classmethod
    def of(cls, model: str, dtype: str) -> ModelShape:
        """Return the shape of a folder, a config.json, or a public model by name.

        Raises:
            ConfigError: there is no such model, its file is unreadable or lacks sizes, or the dtype is unknown.
        """
        return cls.from_config(model, _read_config(model), dtype)

    @classmethod
    def from_config(cls, model: str, config: Mapping[str, Any], dtype: str) -> ModelShape:
        """Return the shape of the config of `model`, which names it in errors. Raises ConfigError as `of` does."""
        if dtype not in _BYTES:
            raise ConfigError(f"dtype {dtype!r} is unknown; use one of {', '.join(_BYTES)}")
        if recurrent := [key for key in _RECURRENT if config.get(key)]:
            raise ConfigError(
                f"the config of {model!r} has {recurrent[0]}, so it has recurrent layers, whose states a plan does not "
                "count; plan a model whose layers all have attention"
            )
        size = partial(_size, model, config)
        num_layers, hidden_size, num_heads = map(size, ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        shape = cls(
            name=model,
            dtype=dtype,
            num_layers=num_layers,
            hidden_size=hidden_size,
            mlp_size=size("moe_intermediate_size", "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=size("num_key_value_heads", default=num_heads),
            head_dim=size("head_dim", default=hidden_size // num_heads),
            vocab_size=size("vocab_size"),
            has_tied_head=bool(config.get("tie_word_embeddings", False)),
            num_experts=size("num_experts", "num_local_experts", "n_routed_experts", default=1),
            num_experts_per_token=size("num_experts_per_tok", default=1),
            num_mtp_layers=size(*MTP_KEYS, default=1),
        )
        if config.get("kv_lora_rank"):
            rank, rotated = size("kv_lora_rank"), size("qk_rope_head_dim")
            expanded = num_heads * (size("qk_nope_head_dim") + rotated + size("v_head_dim"))
            shape = replace(shape, latent_size=rank + rotated, expanded_size=expanded)
        if shape.num_experts_per_token > shape.num_experts:
            raise ConfigError(
                f"the config of {model!r} has num_experts_per_tok {shape.num_experts_per_token} of "
                f"{shape.num_experts} experts; give their number as num_experts"
            )
        return shape

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
        """Return the bytes of weights that a pass of `num_rows` rows reads: of experts only the used ones."""
        share = 1.0 - (1.0 - self.num_experts_per_token / self.num_experts) ** num_rows
        experts = self.num_experts * share * self._expert_weights
        return (self._attention_weights + experts + self._head_weights) * self.bytes_per_weight

    @property
    def row_flops(self) -> float:
        """Operations of one row without attention: two per weight."""
        return 2 * (self._attention_weights + self.num_experts_per_token * self._expert_weights + self._head_weights)

    @property
    def attention_flops(self) -> float:
        """Operations of one row per token of its context."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values per token, in bfloat16, or in float32 if the weights are."""
        numbers = self.expanded_size or 2.0 * self.num_kv_heads * self.head_dim
        return self.num_layers * numbers * (4 if self.dtype == "float32" else 2)

    def cached_bytes(self, *, has_latents: bool) -> float:
        """Return the bytes of a token in the cache: latents if it has them and the model does, else keys and values."""
        latents = self.num_layers * self.latent_size * (4.0 if self.dtype == "float32" else 2.0)
        return latents if has_latents and latents else self.kv_bytes


def _read_config(model: str) -> Mapping[str, Any]:
    if os.path.isdir(model):
        return _text_config(read_config(Path(model)), model)
    if os.path.isfile(model):
        return _text_config(read_mapping(Path(model)), model)
    return entry_of("shapes", model, "or give a folder or a config.json")


def _text_config(config: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    """Return the language model's part of a config: `text_config` of a multimodal model, else the whole."""
    part = config.get("text_config")
    if not isinstance(part, dict | None):
        raise ConfigError(f"the config of {model!r} has text_config {part!r}; a plan needs a mapping, or none")
    return config if part is None else part


def _size(model: str, config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """Return the first of these keys that is neither null nor 0, else the default.

    Raises:
        ConfigError: the value is not a whole number from 1 to the largest that a plan takes.
    """
    key = next((key for key in keys if config.get(key)), keys[-1])
    value = config.get(key) or default
    largest = 1 << 31
    if type(value) is not int or not 1 <= value <= largest:
        found = f"{key} {config[key]!r}" if key in config else f"no {key!r}"
        raise ConfigError(
            f"the config of {model!r} has {found}; a plan needs a Llama-like config.json, with a whole number from 1 "
            f"to {largest} there"
        )
    return value


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device: memory in GiB, GB/s, TFLOP/s by dtype, a pass's shares of both, USD per hour.

    `overlaps` is True if a pass reads and computes at the same time. `host_ms` is the host's cost of a pass.
    """

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    peak_tflops: dict[str, float]
    link_gb_s: float
    bandwidth_use: float
    flops_use: float
    host_ms: float
    overlaps: bool
    price_usd_per_hour: float
    source: str
    date: str

    @classmethod
    def of(cls, name: str) -> DeviceSpec:
        """Return a device of the table.

        Raises:
            ConfigError: the table has no such device.
        """
        entry = entry_of("hardware", name, "or take the nearest and give its figures by --bandwidth, --tflops, --price")
        return cls(name=name.lower(), **{**entry, "date": str(entry["date"])})

    def caches_latents(self, num_devices: int) -> bool:
        """True for one processor; processors are the devices that do not overlap."""
        return not self.overlaps and num_devices == 1

    def bytes_per_s(self, num_devices: int) -> float:
        """Return the bytes per second that a pass reads on `num_devices` devices."""
        return self.bandwidth_gb_s * 1e9 * self.bandwidth_use * num_devices

    def flops_per_s(self, dtype: str, num_devices: int) -> float:
        """Return the operations per second of products in `dtype`, or in bf16 if the table lacks `dtype`."""
        return self.peak_tflops.get(dtype, self.peak_tflops["bf16"]) * 1e12 * self.flops_use * num_devices

    def all_reduce_s(self, num_bytes: float, num_devices: int) -> float:
        """Return the seconds of one sum among the devices of a replica, 0 with one."""
        if num_devices == 1:
            return 0.0
        # 10 us: assumed latency of one all-reduce between GPUs of a group.
        return 10e-6 + 2 * (num_devices - 1) / num_devices * num_bytes / (self.link_gb_s * 1e9)


@dataclass(frozen=True, slots=True)
class PassCost:
    """A pass: the bytes it reads, the operations it computes, and the seconds of each."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    bytes_s: float
    flops_s: float
    overlaps: bool
    extra_s: float  # sums between devices, and the host

    @property
    def seconds(self) -> float:
        busy_s = max(self.bytes_s, self.flops_s) if self.overlaps else self.bytes_s + self.flops_s
        return busy_s + self.extra_s

    @property
    def is_memory_bound(self) -> bool:
        return self.bytes_s >= self.flops_s


def pass_cost(
    shape: ModelShape, device: DeviceSpec, num_devices: int, num_rows: int, num_streams: int, context: int
) -> PassCost:
    """Return the cost of a pass: `num_rows` rows in all, and `context` tokens per stream.

    The keys and values of a stream are read once, however many rows it has.
    """
    weight_bytes = shape.read_bytes(num_rows)
    kv_bytes = num_streams * context * shape.cached_bytes(has_latents=device.caches_latents(num_devices))
    flops = num_rows * (shape.row_flops + context * shape.attention_flops)
    sums = 2 * shape.num_layers * device.all_reduce_s(2.0 * num_rows * shape.hidden_size, num_devices)
    return PassCost(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        flops=flops,
        bytes_s=(weight_bytes + kv_bytes) / device.bytes_per_s(num_devices),
        flops_s=flops / device.flops_per_s(shape.dtype, num_devices),
        overlaps=device.overlaps,
        extra_s=sums + device.host_ms / 1000,
    )

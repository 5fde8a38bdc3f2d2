"""Sharding of a model over ranks: transformers' plan for its family, or a refusal by name.

A family's plan maps modules and parameters to a style of sharding ("colwise": by outputs). The families of
`engine.model.decoders.llama_decoder` are sharded by its own code in the same way. For all families the plan names the
sizes that the number of ranks must divide. No weights are needed: the model is built without memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from protos.errors import ConfigError


class ShardStyle(StrEnum):
    """Style of sharding for a linear layer, a parameter or a module; the values are transformers' words."""

    OUTPUTS = "colwise"  # a rank has its outputs
    PACKED_OUTPUTS = "packed_colwise"  # a rank has its outputs of each of two concatenated products
    JOINED_OUTPUTS = "colwise_gather_output"  # a rank computes its outputs and receives all
    INPUTS = "rowwise"  # a rank has only its inputs; the results are summed
    SPLIT_INPUTS = "rowwise_split_input"  # a rank has all inputs and takes its own; the results are summed
    SUM = "moe_tp_experts"  # the module returns a partial result, which is summed


_STYLES = {str(style): style for style in ShardStyle} | {
    "colwise_rep": ShardStyle.JOINED_OUTPUTS,
    "rowwise_rep": ShardStyle.SPLIT_INPUTS,
}
# Whole on every rank: parts for training alone, and tables, since a look-up costs less than summing its result.
_WHOLE_IN_INFERENCE = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"}
_TABLES = {"embedding_rowwise", "embedding_colwise"}
_OF_PARAMETERS = {ShardStyle.OUTPUTS, ShardStyle.PACKED_OUTPUTS, ShardStyle.INPUTS}
_HEAD_COUNTS = ("num_key_value_heads", "num_attention_heads")


def check_divisible(config: PreTrainedConfig, size: int) -> None:
    """Raise ConfigError if a model of this configuration cannot be sharded over `size` ranks."""
    numbers = _sharded_sizes(_without_memory(config), size)
    for name, number in numbers.items():
        if number % size:
            raise ConfigError(
                f"target.tensor_parallel_size is {size}, but it must divide the model's {name} {number}; "
                f"choose one of {', '.join(map(str, _divisors(math.gcd(*numbers.values()))))}"
            )


def shard_plan(model: PreTrainedModel, size: int) -> dict[str, ShardStyle]:
    """Return the styles of linear layers, parameters and modules by name; all others stay whole on every rank.

    Raises:
        ConfigError: transformers has no plan for the family, or its plan needs an unsupported style.
    """
    if not model.config.get_text_config().base_model_tp_plan:
        raise not_sharded(model, size, "transformers has no plan to shard it")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    styles: dict[str, ShardStyle] = {}
    for pattern, word in model.tp_plan.items():
        names = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in filter(names.fullmatch, (*modules, *parameters)):
            if word not in _WHOLE_IN_INFERENCE | _TABLES:
                styles[name] = _style(model, size, name, word, modules.get(name))
    return styles


def not_sharded(model: PreTrainedModel, size: int, reason: str) -> ConfigError:
    """Return the error for a family that runs only on one device."""
    return ConfigError(
        f"target.tensor_parallel_size is {size}, but model type {model.config.model_type!r} runs on one device: "
        f"{reason}; set it to 1"
    )


def _without_memory(config: PreTrainedConfig) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ConfigError(f"model type {config.model_type!r} cannot be built: {error}") from error
    return model


def _style(model: PreTrainedModel, size: int, name: str, word: str, module: nn.Module | None) -> ShardStyle:
    style = _STYLES.get(word)
    if module is None:
        is_done = style in _OF_PARAMETERS
    else:
        is_done = style is ShardStyle.SUM or (style is not None and type(module) is nn.Linear)
    if style is None or not is_done:
        kind = "a parameter" if module is None else f"a {type(module).__name__}"
        raise not_sharded(model, size, f"transformers' plan shards {name}, {kind}, by {word!r}, which is not supported")
    return style


def _sharded_sizes(model: PreTrainedModel, size: int) -> Mapping[str, int]:
    """Return all sizes that the number of ranks must divide, by name; heads first, as users know them."""
    plan = shard_plan(model, size)
    numbers: dict[str, int] = {}
    if any(style is ShardStyle.OUTPUTS and "att" in name for name, style in plan.items()):
        config = model.config.get_text_config()
        counts = {name: getattr(config, name, None) for name in _HEAD_COUNTS}
        numbers |= {name: count for name, count in counts.items() if isinstance(count, int)}
    weights = dict(model.named_parameters())
    for name, style in plan.items():
        if style not in (ShardStyle.SUM, ShardStyle.JOINED_OUTPUTS):  # the last rank's outputs may be fewer
            tensor = weights[name] if name in weights else weights[f"{name}.weight"]
            numbers[f"{name} of width"] = _width(tensor, style)
    return numbers


def _width(tensor: Tensor, style: ShardStyle) -> int:
    """Return the number of inputs or outputs of a weight [..., out, in], or elements of [out], that ranks divide."""
    if style in (ShardStyle.INPUTS, ShardStyle.SPLIT_INPUTS) or tensor.ndim == 1:
        return tensor.shape[-1]
    return tensor.shape[-2] // 2 if style is ShardStyle.PACKED_OUTPUTS else tensor.shape[-2]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

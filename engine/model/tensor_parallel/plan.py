"""Sharding of a model over ranks: the plan that transformers ships for its family, or a refusal by name.

A family's plan names modules and parameters and says by a word how each is cut ("colwise": by outputs). Families that
`engine.model.decoders.llama_decoder` computes are cut by its own code, along the same lines; the plan says for all of
them what a number of ranks has to divide. The weights are not needed for that: the model is built without memory.
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


class Cut(StrEnum):
    """Cut of a linear layer, a parameter or a module; the values are transformers' words."""

    OUTPUTS = "colwise"  # a rank has its outputs
    PACKED_OUTPUTS = "packed_colwise"  # of two products whose outputs lie side by side, its outputs of each
    JOINED_OUTPUTS = "colwise_gather_output"  # a rank computes its outputs, and has all
    INPUTS = "rowwise"  # of its inputs, which are all it has; the results are summed
    SPLIT_INPUTS = "rowwise_split_input"  # a rank has all inputs and takes its own; the results are summed
    SUM = "moe_tp_experts"  # what the module returns is partial, and is summed


_CUTS = {str(cut): cut for cut in Cut} | {"colwise_rep": Cut.JOINED_OUTPUTS, "rowwise_rep": Cut.SPLIT_INPUTS}
# Whole on every rank: what differs in training alone, and tables, as a look-up costs less than a sum of what it finds.
_WHOLE_IN_INFERENCE = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"}
_TABLES = {"embedding_rowwise", "embedding_colwise"}
_OF_PARAMETERS = {Cut.OUTPUTS, Cut.PACKED_OUTPUTS, Cut.INPUTS}
_HEAD_COUNTS = ("num_key_value_heads", "num_attention_heads")


def check_divisible(config: PreTrainedConfig, size: int) -> None:
    """Raise ConfigError where a model of this configuration cannot be sharded over `size` ranks."""
    numbers = _sharded_sizes(_without_memory(config), size)
    for name, number in numbers.items():
        if number % size:
            raise ConfigError(
                f"target.tensor_parallel_size is {size}, and the model has {name} {number}, which it does not divide; "
                f"choose one of {', '.join(map(str, _divisors(math.gcd(*numbers.values()))))}"
            )


def shard_plan(model: PreTrainedModel, size: int) -> dict[str, Cut]:
    """Cuts of linear layers, parameters and modules by name; all others stay whole on every rank.

    Raises:
        ConfigError: transformers has no plan for the family, or one that needs more than is done here.
    """
    if not model.config.get_text_config().base_model_tp_plan:
        raise not_sharded(model, size, "transformers has no plan to divide it")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    cuts: dict[str, Cut] = {}
    for pattern, word in model.tp_plan.items():
        names = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in filter(names.fullmatch, (*modules, *parameters)):
            if word not in _WHOLE_IN_INFERENCE | _TABLES:
                cuts[name] = _cut(model, size, name, word, modules.get(name))
    return cuts


def not_sharded(model: PreTrainedModel, size: int, reason: str) -> ConfigError:
    """The error for a family that one device can serve and several cannot."""
    return ConfigError(
        f"target.tensor_parallel_size is {size}, and model type {model.config.model_type!r} runs on one device: "
        f"{reason}; set it to 1"
    )


def _without_memory(config: PreTrainedConfig) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ConfigError(f"model type {config.model_type!r} cannot be built: {error}") from error
    return model


def _cut(model: PreTrainedModel, size: int, name: str, word: str, module: nn.Module | None) -> Cut:
    cut = _CUTS.get(word)
    if module is None:
        is_done = cut in _OF_PARAMETERS
    else:
        is_done = cut is Cut.SUM or (cut is not None and type(module) is nn.Linear)
    if cut is None or not is_done:
        kind = "a parameter" if module is None else f"a {type(module).__name__}"
        raise not_sharded(
            model, size, f"transformers' plan divides {name}, {kind}, by {word!r}, which is not done here"
        )
    return cut


def _sharded_sizes(model: PreTrainedModel, size: int) -> Mapping[str, int]:
    """All that the ranks have to divide, by name; heads first, as users know them."""
    plan = shard_plan(model, size)
    numbers: dict[str, int] = {}
    if any(cut is Cut.OUTPUTS and "att" in name for name, cut in plan.items()):
        config = model.config.get_text_config()
        counts = {name: getattr(config, name, None) for name in _HEAD_COUNTS}
        numbers |= {name: count for name, count in counts.items() if isinstance(count, int)}
    weights = dict(model.named_parameters())
    for name, cut in plan.items():
        if cut not in (Cut.SUM, Cut.JOINED_OUTPUTS):  # the last rank's outputs may be fewer
            tensor = weights[name] if name in weights else weights[f"{name}.weight"]
            numbers[f"{name} of width"] = _width(tensor, cut)
    return numbers


def _width(tensor: Tensor, cut: Cut) -> int:
    """Number of inputs or outputs of a weight [..., out, in], or of elements of [out], that the ranks divide."""
    if cut in (Cut.INPUTS, Cut.SPLIT_INPUTS) or tensor.ndim == 1:
        return tensor.shape[-1]
    return tensor.shape[-2] // 2 if cut is Cut.PACKED_OUTPUTS else tensor.shape[-2]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

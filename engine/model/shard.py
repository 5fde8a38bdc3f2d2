"""A rank's part of a model of any family, cut from transformers' own modules; they compute with it as with the whole.

Their attention takes its number of heads from what the products return: only weights and a few exchanges change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.kv_cache.pool import LayerShape
from engine.model.attention_probe import record_attention
from engine.model.linear.packed_linear import Linear, LinearFactory, PackedLinear, linear_of
from engine.model.tensor_parallel.plan import Cut, division_plan, not_divided
from engine.model.tensor_parallel.rank import Rank
from protos.errors import ConfigError


def divide(model: PreTrainedModel, rank: Rank) -> list[LayerShape]:
    """Leave of `model`, which has our attention, what `rank` computes, in place and on the rank's device.

    All ranks call this together, and the model's forward from now on. Returns the KV that each layer keeps on this
    rank: its heads, or all of them in families whose attention every rank computes.

    Raises:
        ConfigError: its family cannot be divided.
    """
    module: nn.Module = model
    for name, cut in division_plan(model, rank.size).items():
        path, _, key = name.rpartition(".")
        parent = module.get_submodule(path)
        child = getattr(parent, key)
        if cut is Cut.SUM:
            child.register_forward_hook(partial(_sum, rank))
        elif isinstance(child, nn.Linear):
            setattr(parent, key, PackedLinear(child.weight, child.bias, _factory(cut, rank)))
        else:
            setattr(parent, key, nn.Parameter(_part(rank, cut, child), requires_grad=False))
    module.to(rank.device)
    try:
        return [record.shape for record in record_attention(model)]
    except ConfigError as error:
        reason = f"its modules do not compute with the parts of transformers' plan ({error.__cause__ or error})"
        raise not_divided(model, rank.size, reason) from error


def _factory(cut: Cut, rank: Rank) -> LinearFactory:
    """What makes a rank's function of a whole weight and its bias."""
    if cut in (Cut.INPUTS, Cut.SPLIT_INPUTS):
        return partial(_summed, rank, cut is Cut.SPLIT_INPUTS)
    return partial(_joined, rank) if cut is Cut.JOINED_OUTPUTS else partial(_outputs, rank, cut)


def _outputs(rank: Rank, cut: Cut, weight: Tensor, bias: Tensor | None) -> Linear:
    return linear_of(_part(rank, cut, weight), None if bias is None else _part(rank, cut, bias))


def _joined(rank: Rank, weight: Tensor, bias: Tensor | None) -> Linear:
    compute, num_outputs = linear_of(rank.tokens(weight), None if bias is None else rank.tokens(bias)), len(weight)
    return lambda x: rank.join(compute(x), num_outputs)


def _summed(rank: Rank, is_whole: bool, weight: Tensor, bias: Tensor | None) -> Linear:
    compute = linear_of(rank.inputs(weight), rank.bias(bias))
    if is_whole:
        return lambda x: rank.sum(compute(rank.part(x, -1)))
    return lambda x: rank.sum(compute(x))


def _part(rank: Rank, cut: Cut, tensor: Tensor) -> Tensor:
    """This rank's part of a weight [..., out, in] or of what there is one of for each output, [out]."""
    if cut is Cut.PACKED_OUTPUTS:
        dim = max(tensor.ndim - 2, 0)
        return torch.cat([_part(rank, Cut.OUTPUTS, half) for half in tensor.chunk(2, dim)], dim)
    return rank.part(tensor, tensor.ndim - 1 if cut is Cut.INPUTS else max(tensor.ndim - 2, 0))


def _sum(rank: Rank, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return rank.sum(output)

"""Cuts a rank's part of a model of any family out of transformers' own modules, which then compute that part.

The attention infers its number of heads from the products, so only weights and a few exchanges change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.kv_cache.pool import LayerShape
from engine.model.attention_probe import kv_shapes_of, record_layers
from engine.model.linear.packed_linear import Linear, LinearFactory, PackedLinear, linear_of
from engine.model.tensor_parallel import Rank, ShardStyle, not_sharded, shard_plan
from protos.errors import ConfigError


def shard_model(model: PreTrainedModel, rank: Rank) -> list[LayerShape]:
    """Reduce `model`, with our attention, to the part of `rank`, in place and on the rank's device.

    All ranks call this together, and later the model's forward. Returns each layer's KV on this rank: its heads, or all
    heads in families whose attention every rank computes.

    Raises:
        ConfigError: the family cannot be sharded.
    """
    module: nn.Module = model
    for name, style in shard_plan(model, rank.size).items():
        path, _, key = name.rpartition(".")
        parent = module.get_submodule(path)
        child = getattr(parent, key)
        if style is ShardStyle.SUM:
            child.register_forward_hook(partial(_sum, rank))
        elif isinstance(child, nn.Linear):
            function = _factory(style, rank)(child.weight, child.bias)
            setattr(parent, key, PackedLinear(child.weight.shape, function, child.weight.dtype))
        else:
            setattr(parent, key, nn.Parameter(_part(rank, style, child), requires_grad=False))
    module.to(rank.device)
    try:
        return kv_shapes_of(record_layers(model).layers)
    except ConfigError as error:
        reason = f"its modules do not run with the shards of transformers' plan ({error.__cause__ or error})"
        raise not_sharded(model, rank.size, reason) from error


def _factory(style: ShardStyle, rank: Rank) -> LinearFactory:
    """Return the factory of a rank's linear function from a whole weight and bias."""
    if style in (ShardStyle.INPUTS, ShardStyle.SPLIT_INPUTS):
        return partial(_summed, rank, style is ShardStyle.SPLIT_INPUTS)
    return partial(_joined, rank) if style is ShardStyle.JOINED_OUTPUTS else partial(_outputs, rank, style)


def _outputs(rank: Rank, style: ShardStyle, weight: Tensor, bias: Tensor | None) -> Linear:
    return linear_of(_part(rank, style, weight), None if bias is None else _part(rank, style, bias))


def _joined(rank: Rank, weight: Tensor, bias: Tensor | None) -> Linear:
    compute = linear_of(rank.shard_vocab(weight), None if bias is None else rank.shard_vocab(bias))
    num_outputs = len(weight)
    return lambda x: rank.all_gather(compute(x), num_outputs)


def _summed(rank: Rank, is_whole: bool, weight: Tensor, bias: Tensor | None) -> Linear:
    compute = linear_of(rank.shard_columns(weight), rank.summed_bias(bias))
    if is_whole:
        return lambda x: rank.all_reduce(compute(rank.shard(x, -1)))
    return lambda x: rank.all_reduce(compute(x))


def _part(rank: Rank, style: ShardStyle, tensor: Tensor) -> Tensor:
    """Return this rank's part of a weight [..., out, in], or of a vector with an element per output, [out]."""
    if style is ShardStyle.PACKED_OUTPUTS:
        dim = max(tensor.ndim - 2, 0)
        return torch.cat([_part(rank, ShardStyle.OUTPUTS, half) for half in tensor.chunk(2, dim)], dim)
    return rank.shard(tensor, tensor.ndim - 1 if style is ShardStyle.INPUTS else max(tensor.ndim - 2, 0))


def _sum(rank: Rank, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return rank.all_reduce(output)

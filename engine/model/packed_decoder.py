"""The decoder of a stock model with packed weights: our own where its family has a description, else transformers'.

A rank's part of a model of any other family is cut out of transformers' own modules, which then compute that part. The
attention infers its number of heads from the products, so only weights and a few exchanges change.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch.indexing import runs_triton
from engine.kv_cache.pool import LayerShape
from engine.model.attention_probe import LayerRecord, kv_shapes_of, record_layers, set_windows
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.latent import latent_records
from engine.model.decoders.row_operations import use_native_norms
from engine.model.decoders.stock_decoder import StockDecoder
from engine.model.forward_batch import NO_TAPS, HiddenStateTaps
from engine.model.linear.batch_invariant_linear import batch_invariant_factory
from engine.model.linear.packed_experts import make_routers_batch_invariant, pack_experts, widen_shared_gates
from engine.model.linear.packed_linear import Linear, LinearFactory, PackedLinear, linear_of, pack_linears
from engine.model.linear.weight_store import NO_STORE, WeightStore
from engine.model.tensor_parallel import ALONE, Rank, ShardStyle, not_sharded, shard_plan
from engine.recurrent.native_mixer import use_native_mixers
from protos.errors import ConfigError


def pooled_records(model: PreTrainedModel, records: Seq[LayerRecord], rank: Rank = ALONE) -> list[LayerRecord]:
    """Return the records of the pool: of latents in place of keys and values, where our decoder runs."""
    return latent_records(model, records) if FusedDecoder.fits(model, rank) else list(records)


def packed_decoder(
    model: PreTrainedModel,
    records: Seq[LayerRecord],
    factories: tuple[LinearFactory, LinearFactory],
    dtype: torch.dtype,
    taps: HiddenStateTaps = NO_TAPS,
    rank: Rank = ALONE,
    *,
    is_deterministic: bool = False,
    store: WeightStore = NO_STORE,
) -> tuple[FusedDecoder | StockDecoder, list[LayerShape]]:
    """Return the decoder of `rank`, which takes over `model`, and the KV of each layer on this rank.

    Args:
        model: a stock model with our attention and our recurrent layers.
        records: the attention of each layer, from `pooled_records`.
        factories: pack the weights, and the head's weight.
        dtype: of rows.
        taps: the hidden states that the decoder keeps.
        rank: takes its part of the weights.
        is_deterministic: a row's logits do not depend on other rows.
        store: keeps the products of a model on one rank.
    """
    shapes, (make_linear, make_head) = kv_shapes_of(records), factories
    if FusedDecoder.fits(model, rank):
        decoder = FusedDecoder(
            model, records, make_linear, taps, rank, make_head=make_head, is_deterministic=is_deterministic, store=store
        )
        return decoder, [replace(shape, num_kv_heads=shape.num_kv_heads // rank.size) for shape in shapes]
    if is_deterministic:
        make_routers_batch_invariant(model, dtype)
    if rank.size > 1:
        shapes = shard_model(model, rank)
    else:
        pack_experts(model, make_linear, store)
    if is_deterministic:
        make_linear, make_head = (batch_invariant_factory(each, dtype) for each in (make_linear, make_head))
    set_windows(model, records)
    pack_linears(model, make_linear, make_head, store)
    widen_shared_gates(model)
    if rank.size == 1 and model.device.type == "cpu":
        use_native_norms(model, dtype)
        use_native_mixers(model, dtype)
    if rank.size == 1 and runs_triton(torch.empty(0, device=model.device)):
        # Not at the top: processes without a GPU may have no Triton, and need none.
        from engine.recurrent.triton_mixer import use_triton_mixers

        use_triton_mixers(model, dtype)
    return StockDecoder(model, taps), shapes


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

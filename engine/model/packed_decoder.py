"""The decoder of a stock model with packed weights: our own where its family has a description, else transformers'."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from engine.batch.indexing import runs_triton
from engine.kv_cache.pool import LayerShape
from engine.model.attention_probe import LayerRecord, kv_shapes_of, set_windows
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.latent import latent_records
from engine.model.decoders.row_operations import use_native_norms
from engine.model.decoders.stock_decoder import StockDecoder
from engine.model.forward_batch import NO_TAPS, HiddenStateTaps
from engine.model.linear.batch_invariant_linear import batch_invariant_factory
from engine.model.linear.packed_experts import make_routers_batch_invariant, pack_experts, widen_shared_gates
from engine.model.linear.packed_linear import LinearFactory, pack_linears
from engine.model.linear.weight_store import NO_STORE, WeightStore
from engine.model.shard import shard_model
from engine.model.tensor_parallel import ALONE, Rank
from engine.recurrent.native_mixer import use_native_mixers


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

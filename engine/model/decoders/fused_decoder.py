"""Dense decoders in as few operations as torch allows; families without a description run through transformers' own.

A small model on a processor is limited by the number of operations, not by arithmetic. Here q, k and v are one product,
gate and up another, rotary tables are computed once, and no module is called; where every one of a layer's operations
is a kernel of ours, all layers of a pass are one call of those. The agreement check of `PagedModel` holds
this forward to the stock model's logits at every start, as it does the others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.base import LayerOptions
from engine.batch.indexing import runs_triton
from engine.model.checkpoint.unread_weight import joined_weights
from engine.model.decoders.decoder_family import embedding_scale, family_of, norm_epsilon, rotaries
from engine.model.decoders.native_layers import DecoderLayer, DecoderShape, Mlp, NativeLayers
from engine.model.decoders.rotary import RotaryTable
from engine.model.decoders.row_operations import RowOperations, row_operations
from engine.model.forward_batch import NO_TAPS, ForwardBatch, HiddenStateTaps, joined
from engine.model.generation_config import max_positions
from engine.model.linear.batch_invariant_linear import batch_invariant, batch_invariant_factory
from engine.model.linear.gated_linear import GatedProduct, JoinedGate, gated_of
from engine.model.linear.native_product import Gate
from engine.model.linear.packed_experts import (
    NativeMixture,
    make_routers_batch_invariant,
    pack_experts,
    widen_shared_gates,
)
from engine.model.linear.packed_linear import Linear, LinearFactory, keeps_numbers, linear_of, pack_linears, rows_dtype
from engine.model.linear.stand_in import halves_of, joined_of, slices_of, stand_in
from engine.model.linear.weight_store import NO_STORE, WeightStore
from engine.model.tensor_parallel import ALONE, Rank

_MLP_ROWS = 128  # of a prefill chunk at a time, so that the MLP's intermediate result stays in the cache


class FusedDecoder:
    """The forward of one loaded model; takes over its weights and leaves its layers empty.

    Attributes:
        features: the hidden states of the last pass that `taps` selects, [T, F].
        lm_head: from the states after the final norm to the logits of this rank's tokens.
    """

    def __init__(
        self,
        model: Any,
        options: Seq[LayerOptions],
        make_linear: LinearFactory = linear_of,
        taps: HiddenStateTaps = NO_TAPS,
        rank: Rank = ALONE,
        *,
        make_head: LinearFactory | None = None,
        is_deterministic: bool = False,
        store: WeightStore = NO_STORE,
    ) -> None:
        """Take over `model`.

        Args:
            model: a model that `fits`.
            options: what each layer passes to its attention.
            make_linear: packs the weights.
            make_head: packs the head's weight; defaults to `make_linear`.
            taps: the hidden states kept as `features`.
            rank: takes its part of the weights.
            is_deterministic: a row's logits do not depend on other rows, provided that its attention does not.
            store: keeps the products of a model on one rank.
        """
        self.features: Tensor | None = None
        self._taps = taps
        config = model.config
        family = family_of(config)
        assert family is not None, "`fits` says so"
        self._family, self._gate = family, family.function(config)
        attention = model.model.layers[0].self_attn
        self._norms_values = hasattr(attention, "v_norm")
        self._rank = rank
        self._vocab_size = model.lm_head.weight.shape[0]
        self._num_heads = config.num_attention_heads // rank.size
        self._epsilon, self._residual_scale = norm_epsilon(config), family.factor(config, "residual_multiplier")
        self._embedding = rank.to_device(model.model.embed_tokens.weight)
        norm = getattr(model.model, family.final_norm)
        self._final_norm = rank.to_device(family.norm_weight(norm))
        like = self._embedding.new_empty(0, dtype=rows_dtype(make_linear))
        self._is_deterministic = is_deterministic
        self._embedding_scale = embedding_scale(model, family)
        self._logit_scale = family.logit_factor(config)
        self._logit_softcap: float | None = config.final_logit_softcapping if family.has_softcap else None
        model.model.rotary_emb.to(self._embedding.device)
        # Of rows; weights and embedding may have another.
        self._dtype: torch.dtype = getattr(norm, "weight", like).dtype
        like = like.to(self._dtype)
        self._rotaries = {
            kind: RotaryTable(rotary, like, max_positions(config), is_deterministic, family.rotates_pairs)
            for kind, rotary in rotaries(model).items()
        }
        self._rows = self._row_operations({layer.self_attn.head_dim for layer in model.model.layers})
        self._norms_projections = False
        self._make_linear, self._store = make_linear, store
        if rank.size == 1:
            if is_deterministic:
                make_routers_batch_invariant(model, self._dtype)
            pack_experts(model, make_linear, store)
        self._layers = []
        for index, layer_options in enumerate(options):
            if (sinks := layer_options.sinks) is not None:
                layer_options = replace(layer_options, sinks=sinks.float().contiguous())
            self._layers.append(self._take_layer(index, model.model.layers[index], layer_options))
        self._native_layers = self._one_call()
        head, make = model.lm_head, make_head or make_linear
        bias = None if head.bias is None else rank.shard_vocab(head.bias)
        function = store.product("lm_head", lambda: make(rank.shard_vocab(head.weight), bias))
        self.lm_head = self._rowwise(function, head.in_features)
        self._stand_in({head: self.lm_head})

    @staticmethod
    def fits(model: PreTrainedModel, rank: Rank = ALONE) -> bool:
        """True if `model` is of a family whose layers are computed here, on such a rank."""
        family = family_of(model.config)
        is_alone = rank.size == 1 and model.device.type == "cpu"
        return family is not None and (is_alone or family.runs_anywhere)

    @staticmethod
    def fits_config(config: Any) -> bool:
        """True for the configuration of a model that `fits`."""
        return family_of(config) is not None

    @property
    def options(self) -> list[LayerOptions]:
        """The attention of each layer."""
        return [layer.options for layer in self._layers]

    def first(self, num_layers: int) -> FusedDecoder:
        """Return a decoder of the first `num_layers` layers and the same norm and head; it shares all weights."""
        decoder = copy.copy(self)
        decoder._layers, decoder._taps, decoder.features = self._layers[:num_layers], NO_TAPS, None
        return decoder

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Logits of the pass's rows, [R, V]."""
        hidden = self._embedding.index_select(0, batch.input_ids).to(self._dtype)  # [T, hidden]
        if self._embedding_scale != 1.0:
            hidden *= torch.tensor(self._embedding_scale, dtype=self._dtype)  # rounded first, as in transformers
        angles = [table.at(batch) for table in self._rotaries.values()]
        tapped: list[Tensor] = []
        delta: Tensor | None = None  # of the layers so far, not yet part of `hidden`
        first = 0
        # Run the layers up to each tap, so that the tapped sum is complete.
        for tap in sorted({index for index in self._taps.layers if index < len(self._layers)}):
            hidden, delta = self._run_layers(range(first, tap), hidden, delta, angles, batch)
            hidden, delta = self._rows.add_norm(hidden, delta, None)[0], None
            tapped.append(hidden.clone())
            first = tap
        # Without taps, the last layers skip rows whose logits nobody needs.
        kept = None if self._taps else batch.logit_rows
        hidden, delta = self._run_layers(range(first, len(self._layers)), hidden, delta, angles, batch, kept)
        hidden, states = self._rows.add_norm(hidden, delta, self._final_norm)
        if len(self._layers) in self._taps.layers:
            tapped.append(hidden)
        if self._taps.is_final:
            tapped.append(states)
        self.features = joined(tapped)
        if self._taps and batch.logit_rows is not None:
            states = states.index_select(0, batch.logit_rows)
        return self._capped(self._rank.all_gather(self.lm_head(states), self._vocab_size))

    def _capped(self, logits: Tensor) -> Tensor:
        if self._logit_scale != 1.0:
            logits *= self._logit_scale
        if self._logit_softcap is not None:
            logits.div_(self._logit_softcap).tanh_().mul_(self._logit_softcap)
        return logits

    def _run_layers(
        self,
        layers: range,
        hidden: Tensor,
        delta: Tensor | None,
        angles: Seq[Tensor],
        batch: ForwardBatch,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The states after `layers` without the last one's sum, and that sum; `hidden` and `delta` may be overwritten.

        After the last layer's attention only the rows `kept` are computed, all rows if None.
        """
        if self._native_layers is not None and layers and NativeLayers.take(batch):
            for part in self._native_layers.parts(layers):
                some = kept if part.stop == layers.stop else None
                hidden, delta, normed = self._native_layers.run(hidden, delta, angles, batch, part, some)
                if normed is not None:
                    last = self._layers[part.stop - 1]
                    delta = self._normed(self._feed_forward(last, normed), last.mlp_output_norm).contiguous()
                    hidden, delta = _scaled(last, hidden, delta)
            return hidden, delta
        for index in layers:
            layer = self._layers[index]
            hidden, normed = self._rows.add_norm(hidden, delta, layer.input_norm)
            attended = self._attend(index, layer, normed, angles, batch)
            if kept is not None and index == layers[-1]:
                hidden, attended, normed = (rows.index_select(0, kept) for rows in (hidden, attended, normed))
            attended = self._normed(self._rank.all_reduce(layer.output(attended)), layer.output_norm)
            if self._family.is_parallel and layer.mlp_norm is not None:
                normed = self._rows.add_norm(hidden, None, layer.mlp_norm)[1]
            mlp_norm = None if self._family.is_parallel else layer.mlp_norm
            hidden, mlp_normed = self._rows.add_norm(hidden, attended, mlp_norm)
            normed = normed if self._family.is_parallel else mlp_normed
            delta = self._normed(self._feed_forward(layer, normed), layer.mlp_output_norm)
            hidden, delta = _scaled(layer, hidden, delta)
        return hidden, delta

    def _normed(self, delta: Tensor, norm: Tensor | None) -> Tensor:
        return delta if norm is None else self._rows.add_norm(delta, None, norm)[1]

    def _attend(
        self, index: int, layer: DecoderLayer, normed: Tensor, angles: Seq[Tensor], batch: ForwardBatch
    ) -> Tensor:
        """[T, hidden] -> [T, Hq * D]."""
        num_rows = normed.shape[0]
        num_rotated = self._num_heads + layer.num_kv_heads
        qkv = layer.qkv(normed).view(num_rows, -1, layer.head_dim)
        if layer.head_norm is not None and self._norms_values:
            qkv = self._rows.norm_heads(qkv, len(layer.head_norm), layer.head_norm)
        value = qkv[:, num_rotated:]  # [T, H, D]
        if layer.head_norm is not None and self._norms_projections:
            qkv = self._rows.norm_projections(qkv, (self._num_heads, layer.num_kv_heads), layer.head_norm)
        elif layer.head_norm is not None and not self._norms_values:
            qkv = self._rows.norm_heads(qkv, num_rotated, layer.head_norm)
        if layer.table is not None:
            qkv = self._rows.rotate(qkv, num_rotated, angles[layer.table], in_pairs=self._family.rotates_pairs)
        query_key = qkv[:, :num_rotated].transpose(0, 1)[None]  # [1, Hq + H, T, D]
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        attended = batch.attention.attend(index, query, key, value.transpose(0, 1)[None], layer.options)
        return attended.reshape(num_rows, -1)

    def _feed_forward(self, layer: DecoderLayer, normed: Tensor) -> Tensor:
        is_whole = normed.shape[0] <= _MLP_ROWS or not isinstance(layer.mlp, Mlp)
        if is_whole or normed.device.type != "cpu":
            return self._rank.all_reduce(layer.mlp(normed))
        return self._rank.all_reduce(torch.cat([layer.mlp(rows) for rows in normed.split(_MLP_ROWS)]))

    def _take_layer(self, index: int, layer: Any, options: LayerOptions) -> DecoderLayer:
        attention, family = layer.self_attn, self._family
        mlp = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
        projection = getattr(attention, family.output)
        is_joined = hasattr(attention, "qkv_proj")
        if is_joined:
            inputs, num_kv_heads = [attention.qkv_proj], attention.config.num_key_value_heads
        else:  # without own values keys are values too
            inputs = [attention.q_proj, attention.k_proj, attention.v_proj or attention.k_proj]
            num_kv_heads = attention.k_proj.out_features // attention.head_dim
        num_kv_heads //= self._rank.size

        def kept(name: str, make: Callable[[], Linear]) -> Linear:
            return self._store.product(f"layers.{index}.{name}", make)

        joined_inputs = kept("qkv", lambda: self._joined(*inputs))
        qkv = self._rowwise(joined_inputs, inputs[0].in_features)
        output = self._rowwise(kept("output", lambda: self._summed(projection)), projection.in_features)
        self._stand_in({projection: output})
        self._stand_in(dict(zip(inputs, slices_of(qkv, inputs), strict=True)))
        norms = [family.norm(layer, place) for place in range(len(family.norms))]
        before, after, mlp_before, mlp_after = (None if norm is None else self._rank.to_device(norm) for norm in norms)
        kinds = list(self._rotaries)
        kind = None if None in kinds else attention.config.layer_types[index]
        table = kinds.index(kind) if family.encodes_positions(attention) else None
        factor = getattr(layer, "layer_scalar", None)
        shared = getattr(layer, "shared_mlp", None)  # next to the experts, where it is no part of the mixture
        mixture = self._take_mixture(index, mlp, shared) if hasattr(mlp, "experts") else None
        return DecoderLayer(
            input_norm=before,
            qkv=qkv,
            head_norm=self._head_norm(attention, num_kv_heads),
            output=output,
            output_norm=after,
            mlp_norm=mlp_before,
            mlp=self._take_mlp(index, mlp) if mixture is None else mixture,
            mlp_output_norm=mlp_after,
            options=options,
            table=table,
            num_kv_heads=num_kv_heads,
            head_dim=attention.head_dim,
            num_rotated_dims=0 if table is None else self._rotaries[kind].num_dims,
            factor=1.0 if factor is None else float(factor),
        )

    def _take_mlp(self, index: int, mlp: Any) -> Mlp:
        last = getattr(mlp, self._family.mlp[-1])
        summed = self._store.product(f"layers.{index}.down", lambda: self._summed(last))
        down = self._rowwise(summed, last.in_features)
        self._stand_in({last: down})
        if not self._family.is_gated:
            up = getattr(mlp, self._family.mlp[0])
            inner = self._rowwise(self._store.product(f"layers.{index}.up", lambda: self._joined(up)), up.in_features)
            self._stand_in({up: inner})
            return Mlp(inner, down, partial(self._rows.activate, function=self._gate))
        joined = getattr(mlp, "gate_up_proj", None)
        gate, up = (mlp.gate_proj, mlp.up_proj) if joined is None else _halves(joined)
        gated = self._store.product(f"layers.{index}.gated", lambda: self._gated(gate, up))
        halves = halves_of(gated)
        products = {gate: halves[0], up: halves[1]} if joined is None else {joined: joined_of(halves)}
        self._stand_in(products)
        return Mlp(self._rowwise(gated, gate.in_features), down)

    def _take_mixture(self, index: int, mixture: nn.Module, shared: nn.Module | None) -> Linear:
        """Return a stock mixture as one kernel; with packed weights if its experts or its router are of other kinds.

        `shared` is an MLP that is added to it.
        """
        one_call = NativeMixture.of(mixture) if self._family.has_softmax_router else None
        if one_call is None and self._rank.size == 1:
            make_linear = self._make_linear
            if self._is_deterministic:
                make_linear = batch_invariant_factory(make_linear, self._dtype)
            for part, name in ((mixture, "mixture"), (shared, "shared")):
                if part is not None:
                    pack_linears(part, make_linear, store=self._store, prefix=f"layers.{index}.{name}")
            widen_shared_gates(mixture)
        return one_call or partial(_mixed, mixture, shared)

    def _one_call(self) -> NativeLayers | None:
        if self._rank.size > 1:
            return None
        shape = DecoderShape(
            hidden_size=self._embedding.shape[1],
            num_heads=self._num_heads,
            norms_values=self._norms_values,
            norms_projections=self._norms_projections,
            rotates_pairs=self._family.rotates_pairs,
            centers=self._family.centers,
            is_parallel=self._family.is_parallel,
            activation=Gate.NONE if self._family.is_gated else self._gate,
            epsilon=self._epsilon,
            residual_scale=self._residual_scale,
            dtype=self._dtype,
        )
        return NativeLayers.of(self._layers, shape)

    def _row_operations(self, head_dims: set[int]) -> RowOperations:
        like = self._embedding.new_empty(0, dtype=self._dtype)
        if runs_triton(like):
            # Not at the top: processes without a GPU may have no Triton, and need none.
            from engine.model.decoders.triton_rows import TritonRows

            return TritonRows(self._epsilon)
        dims = math.gcd(*head_dims), math.gcd(*(table.num_dims for table in self._rotaries.values()))
        factors = self._epsilon, self._residual_scale
        return row_operations(self._embedding.shape[1], dims, like, *factors, centers=self._family.centers)

    def _summed(self, linear: nn.Linear) -> Linear:
        """A product by this rank's inputs; the sum over all ranks is the layer's output."""
        return self._make_linear(self._rank.shard_columns(linear.weight), self._rank.summed_bias(linear.bias))

    def _head_norm(self, attention: Any, num_kv_heads: int) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        norms = (self._family.norm_weight(norm) for norm in (attention.q_norm, attention.k_norm))
        query, key = map(self._rank.to_device, norms)
        self._norms_projections = query.numel() > attention.head_dim
        if self._norms_projections:
            return torch.cat((query, key)).view(-1, attention.head_dim)
        values = [torch.ones_like(key).expand(num_kv_heads, -1)] if self._norms_values else []
        return torch.cat((query.expand(self._num_heads, -1), key.expand(num_kv_heads, -1), *values))

    def _rowwise(self, function: Linear, num_inputs: int) -> Linear:
        """`function` of rows, batch-invariant if need be; on a GPU the products of `make_linear` are."""
        if not self._is_deterministic or self._embedding.is_cuda:
            return function
        return batch_invariant(function, num_inputs, self._dtype)

    def _stand_in(self, products: Mapping[nn.Linear, Linear]) -> None:
        """Let the stock layers multiply by the packed weights; a rank's shards are not whole layers."""
        if self._rank.size == 1:
            is_exact, is_checked = keeps_numbers(self._make_linear), self._store.is_checked
            stand_in(products, self._dtype, is_exact=is_exact, is_checked=is_checked)

    def _gated(self, gate: nn.Linear, up: nn.Linear) -> GatedProduct:
        """`function(gate(x)) * up(x)`."""
        gated = gated_of(gate, up, self._make_linear, self._gate) if self._rank.size == 1 else None
        return gated or JoinedGate(self._joined(gate, up), self._gate)

    def _joined(self, *linears: nn.Linear) -> Linear:
        """One product in place of several with the same input; outputs lie side by side."""
        biases: list[Tensor] = [self._rank.shard_rows(linear.bias) for linear in linears if linear.bias is not None]
        weights: list[Tensor] = [self._rank.shard_rows(linear.weight) for linear in linears]
        return self._make_linear(joined_weights(weights), torch.cat(biases) if biases else None)


def _scaled(layer: DecoderLayer, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply a layer's states, and the sum that they lack, by the layer's factor."""
    return (hidden, delta) if layer.factor == 1.0 else (hidden * layer.factor, delta * layer.factor)


def _mixed(mixture: nn.Module, shared: nn.Module | None, rows: Tensor) -> Tensor:
    result = mixture(rows[None])
    mixed: Tensor = (result[0] if isinstance(result, tuple) else result)[0]  # some return the choice of experts too
    return mixed if shared is None else mixed + shared(rows)


def _halves(joined: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    """Return the gate and up of a layer that has both, as layers; they share its weight."""
    size = joined.out_features // 2
    gate, up = (nn.Linear(joined.in_features, size, bias=False, device="meta") for _ in range(2))
    for half, weight in zip((gate, up), joined.weight.split(size), strict=True):
        half.weight = nn.Parameter(weight, requires_grad=False)
    return gate, up

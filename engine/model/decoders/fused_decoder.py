"""Decoders in as few operations as torch allows; families without a description run through transformers' own.

A small model on a processor is limited by the number of operations, not by arithmetic. Here q, k and v are one product,
gate and up another, rotary tables are computed once, and no module is called; where every one of a layer's operations
is a kernel of ours, all layers of a pass are one call of those. The agreement check of `PagedModel` holds
this forward to the stock model's logits at every start, as it does the others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.native import NativeAttention
from engine.batch.indexing import runs_triton
from engine.model.attention_probe import LayerRecord, kv_layers_of
from engine.model.decoders.families import (
    embedding_scale,
    family_of,
    layers_of,
    norm_epsilon,
    num_heads_of,
    position_table,
    residual_scale,
    rotaries,
    rotary_of,
)
from engine.model.decoders.mlp import Mlp
from engine.model.decoders.native_layers import MAX_TABLES, DecoderCall, DecoderLayer, NativeLayers
from engine.model.decoders.rotary import RotaryTable
from engine.model.decoders.row_operations import RowOperations, row_operations
from engine.model.decoders.stock_layers import StockLayers
from engine.model.forward_batch import NO_TAPS, ForwardBatch, HiddenStateTaps, joined
from engine.model.generation_config import max_positions
from engine.model.linear.native_product import Gate
from engine.model.linear.packed_linear import LinearFactory, linear_of, rows_dtype
from engine.model.linear.weight_store import NO_STORE, WeightStore
from engine.model.tensor_parallel import ALONE, Rank
from engine.recurrent.native_mixer import use_native_mixers

_MLP_ROWS = 128  # of a prefill chunk at a time, so that the MLP's intermediate result stays in the cache


@dataclass(slots=True)
class _Pass:
    """One pass: its batch, and the inputs that all layers share."""

    batch: ForwardBatch
    angles: list[Tensor]
    inputs: Tensor | None  # the layers' own, [layers, T, size]
    new_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by layer of the pool

    def with_logits(self, rows: Tensor) -> _Pass:
        """Return the pass of the rows with logits, `rows`, in layers that store no keys and values."""
        attention = self.batch.attention
        assert isinstance(attention, NativeAttention), "only our kernels read stored keys alone"
        angles = [table.index_select(0, rows) for table in self.angles]
        inputs = None if self.inputs is None else self.inputs.index_select(1, rows)
        return _Pass(replace(self.batch, attention=attention.with_logits()), angles, inputs)


class FusedDecoder:
    """The forward of one loaded model; takes over its weights and leaves its layers empty.

    Attributes:
        features: the hidden states of the last pass that `taps` selects, [T, F].
        lm_head: from the states after the final norm to the logits of this rank's tokens.
    """

    def __init__(
        self,
        model: Any,
        records: Seq[LayerRecord],
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
            records: the attention of each layer.
            make_linear: packs the weights.
            make_head: packs the head's weight and the factors of latents' keys; defaults to `make_linear`.
            taps: the hidden states kept as `features`.
            rank: takes its part of the weights.
            is_deterministic: a row's logits do not depend on other rows, provided that its attention does not.
            store: keeps the products of a model on one rank.
        """
        self.features: Tensor | None = None
        self._taps, self._rank = taps, rank
        family, config, trunk = family_of(model.config), model.config.get_text_config(), model.get_decoder()
        assert family is not None, "`fits` says so"
        self._family, self._gate, self._is_parallel = family, family.function(config), family.runs_parallel(config)
        self._vocab_size, self._num_heads = len(model.get_output_embeddings().weight), num_heads_of(config) // rank.size
        norm = getattr(trunk, family.final_norm)
        self._epsilon, self._residual_scale = norm_epsilon(config, norm), residual_scale(model, family)
        self._embedding = rank.to_device(model.get_input_embeddings().weight)
        self._positions = position_table(model, family)
        self._final_norm = rank.to_device(family.norm_weight(norm, config.hidden_size))
        # Of rows; weights and embedding may have another.
        self._dtype: torch.dtype = rows_dtype(make_linear) or getattr(norm, "weight", self._embedding).dtype
        like = self._embedding.new_empty(0, dtype=self._dtype)
        self._embedding_scale, self._logit_scale = embedding_scale(model, family), family.logit_factor(config)
        self._logit_softcap: float | None = config.final_logit_softcapping if family.has_softcap else None
        self._has_wide_stream = family.has_wide_stream(config)
        if (rotary := rotary_of(model, family)) is not None:
            rotary.to(self._embedding.device)
        rotary_facts = like, max_positions(config), is_deterministic, family.rotates_pairs
        self._rotaries = {kind: RotaryTable(rotary, *rotary_facts) for kind, rotary in rotaries(model).items()}
        self._rows = self._row_operations({record.shape.key_dim for record in records})
        rows = self._rotaries, self._rows, like
        factories = make_linear, make_head or make_linear
        stock = StockLayers(model, factories, *rows, rank, store=store, is_deterministic=is_deterministic)
        self._take_layers(model, stock, records)
        self._native_layers = self._one_call()
        self.lm_head = stock.head()

    def _take_layers(self, model: Any, stock: StockLayers, records: Seq[LayerRecord]) -> None:
        self._inputs = stock.inputs()
        use_native_mixers(model, self._dtype)
        parts, state_layers = zip(records, kv_layers_of(records), strict=True), count()
        self._layers: list[DecoderLayer] = []
        self._starts: list[int] = []  # of the model's layers in ours: two where a recurrent part follows attention
        for index, layer in enumerate(layers_of(model)):
            self._starts.append(len(self._layers))
            attention, mixer = self._family.attention_of(layer), self._family.mixer_of(layer)
            if attention is not None:
                self._layers.append(stock.attending(index, *next(parts)))
            if mixer is not None:
                self._layers.append(stock.recurrent(index, next(state_layers)))
            if attention is None and mixer is None:
                self._layers.append(stock.alone(index))
        self._norms_values, self._norms_projections = stock.norms_values, stock.norms_projections
        self._gates_attention = stock.gates_attention
        self._num_storing = 1 + max(index for index, layer in enumerate(self._layers) if layer.stores_kv)

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

    def first(self, num_layers: int) -> FusedDecoder:
        """Return a decoder of the first `num_layers` layers and the same norm and head; it shares all weights."""
        decoder, end = copy.copy(self), [*self._starts, len(self._layers)][num_layers]
        decoder._layers, decoder._taps, decoder.features = self._layers[:end], NO_TAPS, None
        decoder._starts = self._starts[:num_layers]
        return decoder

    @property
    def is_recordable(self) -> bool:
        """True if passes can be recorded as far as recurrent layers are concerned."""
        return all(layer.mixer is None for layer in self._layers)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Logits of the pass's rows, [R, V]."""
        hidden = self._embedding.index_select(0, batch.input_ids).to(self._dtype)  # [T, hidden]
        if self._embedding_scale != 1.0:
            hidden *= torch.tensor(self._embedding_scale, dtype=self._dtype)  # rounded first, as in transformers
        if self._positions is not None:
            hidden += self._positions.index_select(0, batch.position_ids)
        if self._has_wide_stream:
            hidden = hidden.float()
        inputs = None if self._inputs is None else self._inputs.of(batch.input_ids, hidden)
        if self._family.norms_embeddings:
            hidden = self._rows.add_norm(hidden, None, self._final_norm)[1]
        shared = _Pass(batch, [table.at(batch) for table in self._rotaries.values()], inputs)
        tapped: list[Tensor] = []
        delta: Tensor | None = None  # of the layers so far, not yet part of `hidden`
        first = 0
        # Run the layers up to each tap, so that the tapped sum is complete.
        for tap in sorted({self._starts[index] for index in self._taps.layers if index < len(self._starts)}):
            hidden, delta = self._run_layers(range(first, tap), hidden, delta, shared)
            hidden, delta = self._rows.add_norm(hidden, delta, None)[0], None
            tapped.append(hidden.clone())
            first = tap
        # Without taps, the last layers skip rows whose logits nobody needs.
        kept = None if self._taps else batch.logit_rows
        layers = range(first, len(self._layers))
        if kept is not None and self._num_storing < layers.stop and self._runs_native(batch):
            # Layers that store no keys and values are for the rows with logits alone.
            hidden, delta = self._run_layers(range(self._num_storing), hidden, delta, shared)
            assert delta is not None, "the first layer stores keys and values"
            hidden, delta = hidden.index_select(0, kept), delta.index_select(0, kept)
            shared = shared.with_logits(kept)
            layers, kept = range(self._num_storing, layers.stop) if len(kept) else range(0), None
        hidden, delta = self._run_layers(layers, hidden, delta, shared, kept)
        hidden, states = self._rows.add_norm(hidden, delta, self._final_norm)
        if len(self._starts) in self._taps.layers:
            tapped.append(hidden)
        if self._taps.is_final:
            tapped.append(states)
        self.features = joined(tapped)
        if self._taps and batch.logit_rows is not None:
            states = states.index_select(0, batch.logit_rows)
        return self._capped(self._rank.all_gather(self.lm_head(states), self._vocab_size))

    def _runs_native(self, batch: ForwardBatch) -> bool:
        return self._native_layers is not None and NativeLayers.take(batch)

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
        shared: _Pass,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The states after `layers` without the last one's sum, and that sum; `hidden` and `delta` may be overwritten.

        After the last layer's attention only the rows `kept` are computed, all rows if None.
        """
        native = self._native_layers
        if native is not None and layers and self._runs_native(shared.batch):
            for part in native.parts(layers):
                some = kept if part.stop == layers.stop else None
                angles, batch = shared.angles, shared.batch
                hidden, delta, normed = native.run(hidden, delta, angles, batch, part, some, shared.inputs)
                if normed is not None:
                    hidden, delta = self._after_attention(part.stop - 1, hidden, normed, shared, some)
            return hidden, delta
        normed = hidden
        for index in layers:
            layer, some = self._layers[index], kept if index == layers[-1] else None
            if layer.mixes_rows:
                hidden, delta, normed = self._mix(layer, hidden, delta, normed, shared, some)
            elif some is not None:
                hidden, delta = hidden.index_select(0, some), None if delta is None else delta.index_select(0, some)
            if layer.mlp is None:
                continue
            if self._is_parallel and layer.mlp_norm is not None:
                normed = self._rows.add_norm(hidden, None, layer.mlp_norm)[1]
            mlp_norm = None if self._is_parallel else layer.mlp_norm
            hidden, mlp_normed = self._rows.add_norm(hidden, delta, mlp_norm)
            normed = normed if self._is_parallel else mlp_normed
            hidden, delta = self._after_attention(index, hidden, normed, shared, some)
        return hidden, delta

    def _mix(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        delta: Tensor | None,
        normed: Tensor,
        shared: _Pass,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states before a layer's attention or recurrent part, its result, and the normed rows that it reads.

        `normed` are the rows of the layer before. All three have the rows `kept` alone, if given.
        """
        if layer.shares_rows:
            hidden = self._rows.add_norm(hidden, delta, None)[0]
        else:
            hidden, normed = self._rows.add_norm(hidden, delta, layer.input_norm)
        if layer.mixer is None:
            mixed = self._attend(layer, normed, shared)
        else:
            mixed = layer.mixer(normed[None], state_pass=shared.batch.states)[0]
        if kept is not None:
            hidden, mixed, normed = (rows.index_select(0, kept) for rows in (hidden, mixed, normed))
        if layer.mixer is None:
            assert layer.output is not None, "attention has both products"
            mixed = self._normed(mixed, layer.attended_norm)
            mixed = self._rank.all_reduce(layer.output(mixed))
        if layer.output_factor != 1.0:
            mixed = mixed * layer.output_factor
        return hidden, self._normed(mixed, layer.output_norm), normed

    def _after_attention(
        self, index: int, hidden: Tensor, normed: Tensor, shared: _Pass, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The states after layer `index` without its last sum, and that sum; `normed` are the rows for its MLP."""
        layer, step = self._layers[index], self._layers[index].input_step
        delta = self._feed_forward(layer, normed)
        if layer.down_factor != 1.0:
            delta = delta * layer.down_factor
        delta = self._normed(delta, layer.mlp_output_norm)
        if step is not None:
            assert shared.inputs is not None, "all layers have inputs, or none"
            own = shared.inputs[index] if kept is None else shared.inputs[index].index_select(0, kept)
            hidden = self._rows.add_norm(hidden, delta, None)[0]
            gated = self._rows.gate(step.gate(hidden), step.function, own)
            delta = self._normed(step.projection(gated), step.norm)
        if layer.factor != 1.0:
            hidden, delta = hidden * layer.factor, delta * layer.factor
        return hidden, delta.contiguous()

    def _normed(self, delta: Tensor, norm: Tensor | None) -> Tensor:
        return delta if norm is None else self._rows.add_norm(delta, None, norm)[1]

    def _attend(self, layer: DecoderLayer, normed: Tensor, shared: _Pass) -> Tensor:
        """[T, hidden] -> [T, Hq * D]."""
        num_rows, num_keys = normed.shape[0], layer.num_kv_heads if layer.stores_kv else 0
        num_rotated, num_heads = self._num_heads + num_keys, self._num_heads + 2 * num_keys
        assert layer.qkv is not None, "attention has both products"
        if layer.latent is not None:
            assert layer.tables is not None, "its positions are encoded"
            angles = shared.angles[layer.tables[0]]
            parts = layer.latent.absorb(layer.qkv(normed), angles, in_pairs=self._family.rotates_pairs)
            query, key = (part.transpose(0, 1)[None] for part in parts)
            value = key[..., : layer.value_dim]
            latents = shared.batch.attention.attend(layer.kv_layer, query, key, value, layer.options)
            return layer.latent.values(latents[0]).flatten(1)
        rows, own_values = layer.qkv(normed), None
        if layer.value_dim != layer.head_dim:
            rows, own_values = rows.tensor_split((num_rotated * layer.head_dim,), dim=1)
        qkv, gates = rows.reshape(num_rows, -1, layer.head_dim).tensor_split((num_heads,), dim=1)
        if layer.head_norm is not None and self._norms_values:
            qkv = self._rows.norm_heads(qkv, num_heads, layer.head_norm)
        value = qkv[:, num_rotated:] if own_values is None else own_values.view(num_rows, num_keys, -1)  # [T, H, D]
        if layer.value_factor != 1.0:
            value = value * layer.value_factor
        if not self._family.norms_rotated:
            qkv = self._normed_heads(layer, qkv, num_rotated)
        if layer.tables is not None:
            qkv = self._rotated(qkv, num_rotated, *(shared.angles[table] for table in layer.tables))
        if self._family.norms_rotated:
            qkv = self._normed_heads(layer, qkv, num_rotated)
        # [1, heads, T, D]
        query, key, value = (heads.transpose(0, 1)[None] for heads in (*self._split(qkv, num_rotated), value))
        if layer.stores_kv:
            shared.new_kv[layer.kv_layer] = key, value
        new_kv = shared.new_kv[layer.kv_layer]
        attended = shared.batch.attention.attend(layer.kv_layer, query, *new_kv, layer.options).reshape(num_rows, -1)
        if self._gates_attention:
            attended = self._rows.gate(gates.reshape(num_rows, -1), Gate.LOGISTIC, attended)
        return attended

    def _normed_heads(self, layer: DecoderLayer, heads: Tensor, num_rotated: int) -> Tensor:
        """The queries and keys of each row, normed where the layer does so and values are not normed with them."""
        if layer.head_norm is None or self._norms_values:
            return heads
        if self._norms_projections:
            return self._rows.norm_projections(heads, (self._num_heads, layer.num_kv_heads), layer.head_norm)
        return self._rows.norm_heads(heads, num_rotated, layer.head_norm)

    def _rotated(self, heads: Tensor, num_rotated: int, of_keys: Tensor, of_queries: Tensor) -> Tensor:
        """The queries and keys of each row, [T, num_rotated, D], rotated by their angles."""
        in_pairs = self._family.rotates_pairs
        if of_keys is of_queries:
            return self._rows.rotate(heads, num_rotated, of_keys, in_pairs=in_pairs)
        parts = zip(self._split(heads, num_rotated), (of_queries, of_keys), strict=True)
        return torch.cat([self._rows.rotate(part, part.shape[1], own, in_pairs=in_pairs) for part, own in parts], 1)

    def _split(self, heads: Tensor, num_rotated: int) -> tuple[Tensor, Tensor]:
        """The queries and the keys of each row."""
        return heads[:, : self._num_heads], heads[:, self._num_heads : num_rotated]

    def _feed_forward(self, layer: DecoderLayer, normed: Tensor) -> Tensor:
        assert layer.mlp is not None, "the caller has looked"
        is_whole = normed.shape[0] <= _MLP_ROWS or not isinstance(layer.mlp, Mlp)
        if is_whole or normed.device.type != "cpu":
            return self._rank.all_reduce(layer.mlp(normed))
        return self._rank.all_reduce(torch.cat([layer.mlp(rows) for rows in normed.split(_MLP_ROWS)]))

    def _one_call(self) -> NativeLayers | None:
        if self._rank.size > 1 or len(self._rotaries) > MAX_TABLES:
            return None
        decoder = DecoderCall(
            hidden_size=self._embedding.shape[1],
            num_heads=self._num_heads,
            norms_values=self._norms_values,
            norms_projections=self._norms_projections,
            norms_rotated=self._family.norms_rotated,
            rotates_pairs=self._family.rotates_pairs,
            centers=self._family.centers,
            is_parallel=self._is_parallel,
            gates_attention=self._gates_attention,
            activation=Gate.NONE if self._family.is_gated else self._gate,
            epsilon=self._epsilon,
            residual_scale=self._residual_scale,
            has_wide_stream=self._has_wide_stream,
        )
        return NativeLayers.of(self._layers, decoder, self._dtype)

    def _row_operations(self, head_dims: set[int]) -> RowOperations:
        like = self._embedding.new_empty(0, dtype=self._dtype)
        if runs_triton(like):
            # Not at the top: processes without a GPU may have no Triton, and need none.
            from engine.model.decoders.triton_rows import TritonRows

            return TritonRows(self._epsilon)
        dims = math.gcd(*head_dims), math.gcd(*(table.num_dims for table in self._rotaries.values()))
        dtype, factors = self._dtype if self._has_wide_stream else None, (self._epsilon, self._residual_scale)
        centers, size = self._family.centers, self._embedding.shape[1]
        return row_operations(size, dims, like, *factors, centers=centers, dtype=dtype)

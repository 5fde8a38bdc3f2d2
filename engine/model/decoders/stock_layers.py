"""The layers of a stock model as our decoder computes them: their weights are packed, and the stock ones use these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.attention.base import LayerOptions
from engine.model.attention_probe import LayerRecord
from engine.model.checkpoint.unread_weight import joined_weights
from engine.model.decoders.decoder_family import family_of, tables_of
from engine.model.decoders.layer_inputs import LayerInputs
from engine.model.decoders.native_layers import DecoderLayer, InputStep, Mlp
from engine.model.decoders.rotary import RotaryTable
from engine.model.decoders.row_operations import RowOperations
from engine.model.linear.batch_invariant_linear import batch_invariant, batch_invariant_factory
from engine.model.linear.gated_linear import GatedProduct, JoinedGate, gated_of
from engine.model.linear.packed_experts import (
    NativeMixture,
    make_routers_batch_invariant,
    pack_experts,
    widen_shared_gates,
)
from engine.model.linear.packed_linear import Linear, LinearFactory, keeps_numbers, linear_of, pack_linears
from engine.model.linear.stand_in import halves_of, joined_of, reordered, slices_of, stand_in
from engine.model.linear.weight_store import WeightStore
from engine.model.tensor_parallel import Rank

_BY_HEADS = "query_key_value"  # one product: query, key and value of the first head, of the second, and so on
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
_MLP_NORMS = "pre_feedforward_layernorm", "post_feedforward_layernorm_1"  # of an MLP next to experts,
_EXPERT_NORMS = "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"  # and of these


class StockLayers:
    """Takes over the layers of one model, one by one, and leaves them without weights of their own.

    Attributes:
        norms_values: values are normed too.
        norms_projections: all queries of a row are normed together, and all keys.
        gates_attention: the last outputs of a layer's first product are gates of the attention's results.
    """

    def __init__(
        self,
        model: Any,
        make_linear: LinearFactory,
        rotaries: Mapping[str | None, RotaryTable],
        rows: RowOperations,
        like: Tensor,
        rank: Rank,
        *,
        store: WeightStore,
        is_deterministic: bool,
    ) -> None:
        """Pack the experts of `model`; `layer`, `inputs` and `head` pack the rest.

        Args:
            model: a stock model of a described family.
            make_linear: packs the weights.
            rank: takes its part of the weights.
            store: keeps the products of a model on one rank.
            rotaries: the tables of rotary angles.
            rows: the operations between products.
            like: has the dtype and the device of rows.
            is_deterministic: a row's results do not depend on other rows.
        """
        family, config = family_of(model.config), model.config.get_text_config()
        assert family is not None, "`FusedDecoder.fits` says so"
        self._model, self._family, self._gate = model, family, family.function(config)
        self._make_linear, self._rank, self._store = make_linear, rank, store
        self._rotaries, self._rows, self._dtype = rotaries, rows, like.dtype
        self._is_deterministic, self._is_on_gpu = is_deterministic, like.is_cuda
        self._num_heads, self._hidden_size = config.num_attention_heads // rank.size, config.hidden_size
        self._layers = model.get_decoder().layers
        attentions = (getattr(layer, family.attention) for layer in self._layers if family.mixer(layer) is None)
        attention = next(attentions, None)
        self.norms_values = hasattr(attention, "v_norm")
        self.gates_attention = hasattr(attention, "gate_proj")
        self.norms_projections = False
        if rank.size == 1:
            if is_deterministic:
                make_routers_batch_invariant(model, like.dtype)
            pack_experts(model, make_linear, store)

    def head(self, make_head: LinearFactory) -> Linear:
        """Return the product that yields this rank's logits."""
        head = self._model.get_output_embeddings()
        bias = None if head.bias is None else self._rank.shard_vocab(head.bias)
        return self._product("lm_head", lambda: make_head(self._rank.shard_vocab(head.weight), bias), head)

    def layer(self, index: int, record: LayerRecord, kv_layer: int) -> DecoderLayer:
        """Return a layer.

        Args:
            index: its place in the model.
            record: its attention.
            kv_layer: the place of its keys and values in the pool.
        """
        family, options, layer = self._family, record.options, self._layers[index]
        attention = getattr(layer, family.attention)
        mlp, shared = self._mlp_of(layer)
        projection = getattr(attention, family.output)
        num_kv_heads = record.shape.num_kv_heads // self._rank.size
        qkv = self._qkv(index, attention, record)
        output = self._product(f"layers.{index}.output", lambda: self._summed(projection), projection)
        before, after, mlp_before, mlp_after = self._norms(layer)
        tables = tables_of(attention, index, family, list(self._rotaries))
        factor = getattr(layer, "layer_scalar", None)
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.float().contiguous())
        if hasattr(layer, "experts"):  # next to the MLP, each with its own norms
            taken: Linear = self._experts_beside(index, layer)
            mlp_before = None
        else:
            taken = self._mixture(index, mlp, shared) if hasattr(mlp, "experts") else self._mlp(index, mlp)
        return DecoderLayer(
            input_norm=before,
            qkv=qkv,
            head_norm=self._head_norm(attention, record),
            output=output,
            output_norm=after,
            mlp_norm=mlp_before,
            mlp=taken,
            mlp_output_norm=mlp_after,
            options=options,
            tables=tables,
            kv_layer=kv_layer,
            stores_kv=record.stores_kv,
            num_kv_heads=num_kv_heads,
            head_dim=record.shape.key_dim,
            num_rotated_dims=0 if tables is None else list(self._rotaries.values())[tables[0]].num_dims,
            factor=1.0 if factor is None else float(factor),
            activation_factors=_activation_factors(mlp),
            input_step=self._input_step(index, layer) if hasattr(layer, "per_layer_input_gate") else None,
        )

    def recurrent(self, index: int, state_layer: int) -> DecoderLayer:
        """Return a layer with a recurrent part in place of the attention.

        Args:
            index: its place in the model.
            state_layer: the place of its states in the pool.
        """
        layer = self._layers[index]
        mixer: Any = self._family.mixer(layer)
        first, last = mixer.in_proj, mixer.out_proj
        qkv = self._product(f"layers.{index}.qkv", lambda: self._joined(first), first)
        output = self._product(f"layers.{index}.output", lambda: self._summed(last), last)
        before, after, mlp_before, mlp_after = self._norms(layer)
        mlp, shared = self._mlp_of(layer)
        return DecoderLayer(
            input_norm=before,
            qkv=qkv,
            head_norm=None,
            output=output,
            output_norm=after,
            mlp_norm=mlp_before,
            mlp=self._mixture(index, mlp, shared) if hasattr(mlp, "experts") else self._mlp(index, mlp),
            mlp_output_norm=mlp_after,
            options=LayerOptions(0.0),
            tables=None,
            kv_layer=state_layer,
            stores_kv=True,  # its states, which need all rows
            num_kv_heads=0,
            head_dim=0,
            num_rotated_dims=0,
            mixer=mixer,
        )

    def _norms(self, layer: nn.Module) -> list[Tensor | None]:
        places = range(len(self._family.norms))
        norms = [self._family.norm(layer, place, self._hidden_size) for place in places]
        return [None if norm is None else self._rank.to_device(norm) for norm in norms]

    def _mlp_of(self, layer: Any) -> tuple[Any, nn.Module | None]:
        """Return a layer's MLP or mixture, and an MLP that is added to it where that is no part of the mixture."""
        mixture = getattr(layer, "block_sparse_moe", None)
        if mixture is None:
            return getattr(layer, self._family.mlp_module), None
        return mixture, getattr(layer, "shared_mlp", None)

    def inputs(self) -> LayerInputs | None:
        """Return the inputs of single layers; None for a model without them."""
        trunk = self._model.get_decoder()
        if not hasattr(self._layers[0], "per_layer_input_gate"):
            return None
        linear = trunk.per_layer_model_projection
        projection = self._product("layer_inputs", lambda: self._joined(linear), linear)
        norm = self._family.norm_weight(trunk.per_layer_projection_norm, trunk.hidden_size_per_layer_input)
        return LayerInputs(trunk, norm, projection, self._rows, self._dtype)

    def _qkv(self, index: int, attention: Any, record: LayerRecord) -> Linear:
        name, joined = f"layers.{index}.qkv", getattr(attention, _BY_HEADS, None)
        if joined is not None:
            order = torch.arange(joined.out_features).view(-1, 3, record.shape.key_dim).transpose(0, 1).flatten()
            product = self._store.product(name, lambda: self._joined(joined, order=order))
            qkv = self._rowwise(product, joined.in_features)
            self._stand_in({joined: reordered(qkv, order.argsort())})
            return qkv
        if hasattr(attention, "qkv_proj"):
            inputs = [attention.qkv_proj]
        else:  # without own values keys are values too
            own = [attention.k_proj, attention.v_proj or attention.k_proj] if record.stores_kv else []
            inputs = [attention.q_proj, *own, *([attention.gate_proj] if self.gates_attention else [])]
        qkv = self._rowwise(self._store.product(name, lambda: self._joined(*inputs)), inputs[0].in_features)
        self._stand_in(dict(zip(inputs, slices_of(qkv, inputs), strict=True)))
        return qkv

    def _product(self, name: str, make: Callable[[], Linear], linear: nn.Linear) -> Linear:
        """Return the product `make` makes of a stock layer, which then computes by it."""
        product = self._rowwise(self._store.product(name, make), linear.in_features)
        self._stand_in({linear: product})
        return product

    def _mlp(self, index: int, mlp: Any) -> Mlp:
        last = getattr(mlp, self._family.mlp[-1])
        down = self._product(f"layers.{index}.down", lambda: self._summed(last), last)
        if not self._family.is_gated:
            up = getattr(mlp, self._family.mlp[0])
            inner = self._product(f"layers.{index}.up", lambda: self._joined(up), up)
            factors = _activation_factors(mlp)
            return Mlp(inner, down, partial(self._rows.activate, function=self._gate, factors=factors))
        first, second, _ = self._family.mlp
        joined = getattr(mlp, first if first == second else "gate_up_proj", None)
        gate, up = (getattr(mlp, first), getattr(mlp, second)) if joined is None else _halves(joined)
        gated = self._store.product(f"layers.{index}.gated", lambda: self._gated(gate, up))
        halves = halves_of(gated)
        products = {gate: halves[0], up: halves[1]} if joined is None else {joined: joined_of(halves)}
        self._stand_in(products)
        return Mlp(self._rowwise(gated, gate.in_features), down)

    def _mixture(self, index: int, mixture: nn.Module, shared: nn.Module | None) -> Linear:
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

    def _experts_beside(self, index: int, layer: Any) -> Linear:
        """Return the function of the residual stream that a layer's MLP and its experts add up to."""
        norms = {
            name: self._family.norm_weight(getattr(layer, name), self._hidden_size)
            for name in (*_MLP_NORMS, *_EXPERT_NORMS)
        }
        router = batch_invariant_factory(linear_of, self._dtype) if self._is_deterministic else linear_of
        pack_linears(layer.router, router)
        return partial(_beside_experts, self._rows, self._mlp(index, layer.mlp), layer, norms)

    def _input_step(self, index: int, layer: Any) -> InputStep:
        gate, projection = layer.per_layer_input_gate, layer.per_layer_projection
        norm = self._family.norm_weight(layer.post_per_layer_input_norm, self._hidden_size)
        return InputStep(
            self._product(f"layers.{index}.input_gate", lambda: self._joined(gate), gate),
            self._product(f"layers.{index}.input_projection", lambda: self._joined(projection), projection),
            norm,
            self._gate,
        )

    def _summed(self, linear: nn.Linear) -> Linear:
        """A product by this rank's inputs; the sum over all ranks is the layer's output."""
        return self._make_linear(self._rank.shard_columns(linear.weight), self._rank.summed_bias(linear.bias))

    def _head_norm(self, attention: Any, record: LayerRecord) -> Tensor | None:
        names = next((names for names in _HEAD_NORMS if hasattr(attention, names[0])), None)
        if names is None:
            return None
        dim, num_kv_heads = record.shape.key_dim, record.shape.num_kv_heads // self._rank.size
        modules = [getattr(attention, name) for name in names[: 2 if record.stores_kv else 1]]
        norms = [self._rank.to_device(self._family.norm_weight(module, dim)) for module in modules]
        has_biases = getattr(modules[0], "bias", None) is not None
        self.norms_projections = norms[0].shape[-1] > dim
        if self.norms_projections:
            return torch.cat(norms).view(-1, dim)
        if self.norms_values and record.stores_kv:
            norms.append(torch.ones_like(norms[-1]))
        counts = (self._num_heads, num_kv_heads, num_kv_heads)
        return torch.cat(
            [
                norm[:, None].expand(-1, count, -1) if has_biases else norm.expand(count, -1)
                for norm, count in zip(norms, counts, strict=False)
            ],
            dim=-2,
        )

    def _rowwise(self, function: Linear, num_inputs: int) -> Linear:
        """`function` of rows, batch-invariant if need be; on a GPU the products of `make_linear` are."""
        if not self._is_deterministic or self._is_on_gpu:
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

    def _joined(self, *linears: nn.Linear, order: Tensor | None = None) -> Linear:
        """One product in place of several with the same input; outputs lie side by side, or in `order`."""
        weights: list[Tensor] = [self._rank.shard_rows(linear.weight) for linear in linears]
        weight, bias = joined_weights(weights), None
        present: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        if present:
            biases = [present[0].new_zeros(each.out_features) if each.bias is None else each.bias for each in linears]
            bias = torch.cat([self._rank.shard_rows(each) for each in biases])
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return self._make_linear(weight, bias)


def _activation_factors(mlp: Any) -> tuple[float, float]:
    """Return the factors that xIELU has learned, of positive and of negative numbers; 1 for other functions."""
    function: Any = getattr(mlp, "act_fn", None)
    if not hasattr(function, "alpha_p"):
        return 1.0, 1.0
    above, below = (float(F.softplus(each.detach().float())) for each in (function.alpha_p, function.alpha_n))
    return above, below + float(function.beta)


def _beside_experts(
    rows: RowOperations, mlp: Linear, layer: Any, norms: Mapping[str, Tensor], residual: Tensor
) -> Tensor:
    def normed(states: Tensor, name: str) -> Tensor:
        return rows.add_norm(states, None, norms[name])[1]

    dense = normed(mlp(normed(residual, _MLP_NORMS[0])), _MLP_NORMS[1])
    _, weights, experts = layer.router(residual)
    return dense + normed(layer.experts(normed(residual, _EXPERT_NORMS[0]), experts, weights), _EXPERT_NORMS[1])


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

"""The layers of a stock model as our decoder computes them: their weights are packed, and the stock ones use these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from engine.model.attention_probe import LayerRecord
from engine.model.checkpoint.unread_weight import joined_weights
from engine.model.decoders.decoder_family import DecoderFamily
from engine.model.decoders.families import family_of, layers_of, num_heads_of, tables_of
from engine.model.decoders.head_products import HeadProducts, pack_heads, rowwise_heads
from engine.model.decoders.latent import (
    Latent,
    expand,
    factor_sizes,
    first_latents,
    has_latents,
    key_factor,
    latent_of,
    value_factor,
)
from engine.model.decoders.layer_inputs import LayerInputs
from engine.model.decoders.mlp import Mlp, MlpWithExperts
from engine.model.decoders.native_layers import DecoderLayer, InputStep
from engine.model.decoders.rotary import RotaryTable
from engine.model.decoders.row_operations import RowOperations
from engine.model.linear.batch_invariant_linear import batch_invariant, batch_invariant_factory
from engine.model.linear.gated_linear import GatedProduct, JoinedGate, gated_of
from engine.model.linear.native_mixture import NativeMixture, Products
from engine.model.linear.native_product import Gate
from engine.model.linear.packed_experts import make_routers_batch_invariant, pack_experts, widen_shared_gates
from engine.model.linear.packed_linear import Linear, LinearFactory, keeps_numbers, linear_of, pack_linears, weight_of
from engine.model.linear.stand_in import halves_of, joined_of, reordered, slices_of, stand_in
from engine.model.linear.weight_store import OUTPUTS, WeightStore
from engine.model.tensor_parallel import Rank
from engine.recurrent.native_mixer import first_products, take_products

# One product has queries, keys and values.
_JOINED = ("query_key_value", "qkv_proj", "c_attn")
_BY_HEADS = "query_key_value"  # of the first head, of the second, and so on
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
_INNER_NORMS = ("attn_sub_norm", "ffn_sub_norm")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")  # attributes of a mixture: an MLP that all rows pass
# Norms around an MLP next to experts, and around these.
_NORMS_WITH_EXPERTS = (
    *("pre_feedforward_layernorm", "post_feedforward_layernorm_1"),
    *("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
)


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
        factories: tuple[LinearFactory, LinearFactory],
        rotaries: Mapping[object, RotaryTable],
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
            factories: pack the weights, and those that keep more bits: the head's and the factors of latents' keys.
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
        (self._make_linear, self._make_fine), self._rank, self._store = factories, rank, store
        self._rotaries, self._rows, self._dtype = rotaries, rows, like.dtype
        self._is_deterministic, self._is_on_gpu = is_deterministic, like.is_cuda
        self._num_heads, self._hidden_size = num_heads_of(config) // rank.size, config.hidden_size
        self._layers = layers_of(model)
        _transpose(self._layers)
        self._multipliers = family.multipliers(config)
        attentions = (part for layer in self._layers if (part := family.attention_of(layer)) is not None)
        attention: Any = next(attentions, None)
        self.norms_values = hasattr(attention, "v_norm")
        has_gates = any(getattr(attention, name, None) is not None for name in ("gate_proj", "g_proj"))
        self.gates_attention = has_gates or _has_joined_gates(attention, family)
        self.norms_projections = False
        if rank.size == 1:
            if is_deterministic:
                make_routers_batch_invariant(model, like.dtype)
            pack_experts(model, self._make_linear, store)

    def head(self) -> Linear:
        """Return the product that yields this rank's logits."""
        head = self._model.get_output_embeddings()
        bias = None if head.bias is None else self._rank.shard_vocab(head.bias)
        product = self._product("lm_head", lambda: self._make_fine(self._rank.shard_vocab(head.weight), bias), head)
        if head.weight is None:  # Mamba-2's model asks its head for a dtype
            head.weight = nn.Parameter(torch.empty(0, dtype=self._dtype), requires_grad=False)
        return product

    def attending(self, index: int, record: LayerRecord, kv_layer: int) -> DecoderLayer:
        """Return a layer with attention; its MLP is left to a recurrent part that it has too.

        Args:
            index: its place in the model.
            record: its attention.
            kv_layer: the place of its keys and values in the pool.
        """
        family, options, layer = self._family, record.options, self._layers[index]
        attention: Any = family.attention_of(layer)
        projection = getattr(attention, family.output)
        before, after, *_ = self._norms(layer)
        tables = tables_of(attention, index, family, list(self._rotaries))
        options = replace(options, scaling=options.scaling * self._multipliers.scores)
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.float().contiguous())
        own = DecoderLayer(
            input_norm=before,
            qkv=self._qkv(index, attention, record),
            head_norm=self._head_norm(attention, record),
            latent=self._latents(index, attention) if has_latents(attention) else None,
            attended_norm=self._inner_norm(attention, projection),
            output=self._product(f"layers.{index}.output", lambda: self._summed(projection), projection),
            output_norm=after,
            output_factor=self._multipliers.attention,
            options=options,
            tables=tables,
            kv_layer=kv_layer,
            stores_kv=record.stores_kv,
            num_kv_heads=record.shape.num_kv_heads // self._rank.size,
            head_dim=record.shape.key_dim,
            value_dim=record.shape.value_dim,
            value_factor=getattr(attention, "v_scale", 1.0),
            num_rotated_dims=0 if tables is None else list(self._rotaries.values())[tables[0]].num_dims,
        )
        return own if family.mixer_of(layer) is not None else self._with_mlp(index, own)

    def recurrent(self, index: int, state_layer: int) -> DecoderLayer:
        """Return a layer with a recurrent part, in place of the attention or after it.

        Args:
            index: its place in the model.
            state_layer: the place of its states in the pool.
        """
        layer = self._layers[index]
        mixer: Any = self._family.mixer_of(layer)
        before, after, *_ = self._norms(layer)
        own = DecoderLayer(
            input_norm=before,
            output_norm=after,
            output_factor=self._multipliers.mixer,
            kv_layer=state_layer,
            stores_kv=True,  # its states, which need all rows
            mixer=mixer,
            shares_rows=self._family.attention_of(layer) is not None,
        )
        if (inputs := first_products(mixer)) is None:
            self._pack(mixer, f"layers.{index}.mixer")
        else:
            qkv, steps = self._mixed_products(index, *inputs)
            take_products(mixer, qkv, steps)
            last = mixer.out_proj
            output = self._product(f"layers.{index}.mixed", lambda: self._summed(last), last)
            own = replace(own, qkv=qkv, steps=steps, output=output)
        return self._with_mlp(index, own)

    def _mixed_products(
        self, index: int, linears: list[nn.Linear], order: Tensor | None
    ) -> tuple[Linear, Linear | None]:
        """Return the products of a recurrent part's inputs: one, or another of narrow layers, which are not rounded."""
        wide = [each for each in linears if each.out_features >= OUTPUTS]
        count = sum(each.out_features for each in wide)
        first, last = (None, None) if order is None else (order[:count], order[count:] - count)
        product = self._side_by_side(f"layers.{index}.inputs", wide, first)
        if len(wide) == len(linears):
            return product, None
        exact = partial(linear_of, dtype=self._dtype)
        return product, self._side_by_side(f"layers.{index}.steps", linears[len(wide) :], last, exact)

    def alone(self, index: int) -> DecoderLayer:
        """Return a layer that is an MLP or a mixture."""
        return self._with_mlp(index, DecoderLayer())

    def _with_mlp(self, index: int, own: DecoderLayer) -> DecoderLayer:
        """Return a layer with the MLP or the mixture that the model has there, if it has one."""
        layer: Any = self._layers[index]
        mlp, shared = self._family.mlp_of(layer)
        if mlp is None:
            return own
        _, _, before, after = self._norms(layer)
        if hasattr(layer, "experts"):  # next to the MLP, each with its own norms
            taken: Linear = self._mlp_with_experts(index, layer)
            before = None
        else:
            taken = self._mixture(index, mlp, shared) if hasattr(mlp, "experts") else self._mlp(index, mlp)
        if not isinstance(taken, NativeMixture) and "." in (self._family.norms[-1] or ""):
            after = None  # a stock mixture norms its own results
        factor = getattr(layer, "layer_scalar", None)
        if self._multipliers.mlp != 1.0 and before is not None:
            before = before.float() * self._multipliers.mlp
        return replace(
            own,
            mlp_norm=before,
            mlp=taken,
            inner_norm=self._inner_norm(mlp, getattr(mlp, self._family.mlp[-1], None)),
            mlp_output_norm=after,
            down_factor=self._multipliers.down,
            factor=1.0 if factor is None else float(factor),
            activation_factors=_activation_factors(mlp),
            input_step=self._input_step(index, layer) if hasattr(layer, "per_layer_input_gate") else None,
        )

    def _norms(self, layer: nn.Module) -> list[Tensor | None]:
        places = range(len(self._family.norms))
        norms = [self._family.norm(layer, place, self._hidden_size) for place in places]
        is_float = self._multipliers.mlp != 1.0  # all norms of a model have one dtype
        return [None if norm is None else self._rank.to_device(norm.float() if is_float else norm) for norm in norms]

    def _inner_norm(self, part: nn.Module, last: Any) -> Tensor | None:
        """Return the norm of the rows that the last product of an attention or an MLP reads; None without one."""
        norm = next((each for name in _INNER_NORMS if (each := getattr(part, name, None)) is not None), None)
        return None if norm is None else self._family.norm_weight(norm, last.in_features)

    def _normed(self, norm: Tensor, rows: Tensor) -> Tensor:
        return self._rows.add_norm(rows, None, norm)[1]

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
        order, joined = None, next((name for name in _JOINED if hasattr(attention, name)), None)
        if joined is not None:
            inputs = [getattr(attention, joined)]
            if joined == _BY_HEADS or not getattr(attention, "multi_query", True):
                places = torch.arange(inputs[0].out_features).view(-1, 3, record.shape.key_dim)
                order = places.transpose(0, 1).flatten()
        elif has_latents(attention):
            inputs, order = first_latents(attention)
        else:
            first, *others = self._family.inputs
            stored = [getattr(attention, name) for name in others] if record.stores_kv else []
            own = [each or stored[0] for each in stored]  # without own values keys are values too
            inputs = [getattr(attention, first), *own]
            inputs += [attention.gate_proj] if hasattr(attention, "gate_proj") else []
            if getattr(attention, "g_proj", None) is not None:  # a gate for each head
                return self._with_gates(index, inputs, attention.g_proj, record.shape.key_dim)
            if _has_joined_gates(attention, self._family):
                order = _gates_last([each.out_features for each in inputs], record.shape.key_dim)
        return self._side_by_side(f"layers.{index}.qkv", inputs, order)

    def _with_gates(self, index: int, inputs: list[nn.Linear], gate: nn.Linear, dim: int) -> Linear:
        """Return one product of `inputs` and of each head's gate, once for each of its `dim` numbers."""
        spread = nn.Linear(gate.in_features, gate.out_features * dim, bias=False, device="meta")
        spread.weight = nn.Parameter(gate.weight.repeat_interleave(dim, dim=0), requires_grad=False)
        product = self._side_by_side(f"layers.{index}.qkv", [*inputs, spread], None)
        self._stand_in({gate: partial(_every, spread, dim)})
        return product

    def _side_by_side(
        self, name: str, linears: list[nn.Linear], order: Tensor | None, make_linear: LinearFactory | None = None
    ) -> Linear:
        """Return one product with the outputs of stock layers in an order; these compute by it.

        `make_linear` packs it in place of the model's own; zeros then follow up to whole tiles.
        """
        product = self._store.product(name, lambda: self._joined(*linears, order=order, make_linear=make_linear))
        product = self._rowwise(product, linears[0].in_features)
        plain = product if order is None else reordered(product, order.argsort())
        self._stand_in(dict(zip(linears, slices_of(plain, linears), strict=True)))
        return product

    def _product(self, name: str, make: Callable[[], Linear], linear: nn.Linear) -> Linear:
        """Return the product `make` makes of a stock layer, which then computes by it."""
        product = self._rowwise(self._store.product(name, make), linear.in_features)
        self._stand_in({linear: product})
        return product

    def _latents(self, index: int, attention: Any) -> Latent:
        def take(name: str, linears: list[nn.Linear], order: Tensor | None) -> Linear:
            return self._side_by_side(f"layers.{index}.{name}", linears, order)

        # The keys' factor has other groups than the stored weight, and would round its few bits again.
        sizes = factor_sizes(attention)
        keys = self._heads(f"layers.{index}.keys", partial(key_factor, attention), sizes[0], self._make_fine)
        values = self._heads(f"layers.{index}.values", partial(value_factor, attention), sizes[1], self._make_linear)
        latent = latent_of(attention, take, keys, values)
        self._stand_in({attention.kv_b_proj: partial(expand, keys, values)})
        return latent

    def _heads(
        self, name: str, factor: Callable[[], Tensor], sizes: tuple[int, int, int], make_linear: LinearFactory
    ) -> HeadProducts:
        packed = self._store.product(name, lambda: pack_heads(factor(), make_linear))
        packed = rowwise_heads(packed, partial(self._rowwise, num_inputs=sizes[-1]))
        return HeadProducts(packed, sizes, self._dtype)

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
        norm = self._inner_norm(mlp, last)
        normed = None if norm is None else partial(self._normed, norm)
        return Mlp(self._rowwise(gated, gate.in_features), down, normed)

    def _mixture(self, index: int, mixture: nn.Module, shared: nn.Module | None) -> Linear:
        """Return a stock mixture as one kernel; with packed weights if its experts or its router are of other kinds.

        `shared` is an MLP that is added to it, if that is no part of it.
        """
        routing = self._family.routing
        if routing is not None and NativeMixture.fits(mixture):
            inner = next((part for name in _SHARED if (part := getattr(mixture, name, None)) is not None), shared)
            mlp = None if inner is None else self._mlp(index, inner)
            products, latent = None if mlp is None else (mlp.inner, mlp.down), self._latent(index, mixture)
            if all(NativeMixture.takes(mixture, each) for each in (*(products or ()), *(latent or ()))):
                function = Gate.NONE if self._family.is_gated else self._gate
                one_call = NativeMixture(mixture, routing, products, function, latent)
                pack_linears(mixture, partial(_kept, dtype=self._dtype))  # the stock model's router and gate
                return one_call
        if self._rank.size == 1:
            for part, name in ((mixture, "mixture"), (shared, "shared")):
                if part is not None:
                    self._pack(part, f"layers.{index}.{name}")
            widen_shared_gates(mixture)
        return partial(_mixed, mixture, shared)

    def _latent(self, index: int, mixture: Any) -> Products | None:
        """Return the products before and after experts whose rows have another size; None without any."""
        first = getattr(mixture, "fc1_latent_proj", None)
        if not isinstance(first, nn.Linear):
            return None
        last = mixture.fc2_latent_proj
        return (
            self._product(f"layers.{index}.latent_in", lambda: self._joined(first), first),
            self._product(f"layers.{index}.latent_out", lambda: self._joined(last), last),
        )

    def _pack(self, module: nn.Module, name: str) -> None:
        """Pack the products of a stock module, each on its own."""
        make_linear = self._make_linear
        if self._is_deterministic:
            make_linear = batch_invariant_factory(make_linear, self._dtype)
        pack_linears(module, make_linear, store=self._store, prefix=name)

    def _mlp_with_experts(self, index: int, layer: Any) -> MlpWithExperts:
        router = layer.router
        before, after, *others = (
            self._family.norm_weight(getattr(layer, name), self._hidden_size) for name in _NORMS_WITH_EXPERTS
        )
        router_norm = (router.scale.float() * router.scalar_root_size).to(before.dtype)
        routing, experts, make = self._family.routing, layer.experts, partial(_kept, dtype=self._dtype)
        if routing is not None and NativeMixture.fits(layer):
            experts = NativeMixture(layer, routing)
        pack_linears(router, batch_invariant_factory(make, self._dtype) if self._is_deterministic else make)
        mlp = self._mlp(index, layer.mlp)
        return MlpWithExperts(self._rows, mlp, experts, router, (before, after), (*others, router_norm))

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

    def _joined(
        self, *linears: nn.Linear, order: Tensor | None = None, make_linear: LinearFactory | None = None
    ) -> Linear:
        """One product in place of several with the same input; outputs lie side by side, or in `order`."""
        weights: list[Tensor] = [self._rank.shard_rows(linear.weight) for linear in linears]
        weight, bias = joined_weights(weights), None
        present: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        if present:
            biases = [present[0].new_zeros(each.out_features) if each.bias is None else each.bias for each in linears]
            bias = torch.cat([self._rank.shard_rows(each) for each in biases])
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        if make_linear is None:
            return self._make_linear(weight, bias)
        missing = -len(weight) % OUTPUTS
        padded = F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))
        return make_linear(*padded)


def _transpose(layers: nn.Module) -> None:
    """Make GPT-2's layers, which store weights as [in, out], linear layers of the same numbers."""
    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                weight = weight_of(child)
                assert weight is not None, "it is a plain layer"
                linear = nn.Linear(child.nx, child.nf, device="meta")
                linear.weight, linear.bias = nn.Parameter(weight, requires_grad=False), child.bias
                setattr(module, name, linear)


def _has_joined_gates(attention: Any, family: DecoderFamily) -> bool:
    """True if each head's query comes with a gate of its results from one product."""
    query = getattr(attention, "q_proj", None)
    if query is None or has_latents(attention):  # of latents, whose values have another size
        return False
    return bool(query.out_features == 2 * getattr(attention, family.output).in_features)


def _every(linear: nn.Linear, dim: int, rows: Tensor) -> Tensor:
    """Every `dim`th output of a layer."""
    outputs: Tensor = linear(rows)
    return outputs[..., ::dim]


def _gates_last(sizes: list[int], dim: int) -> Tensor:
    """Return the order that moves gates to the end: the first of `sizes` outputs are queries and gates by heads."""
    places = torch.arange(sum(sizes))
    queries, gates = places[: sizes[0]].view(-1, 2, dim).unbind(1)
    return torch.cat((queries.flatten(), places[sizes[0] :], gates.flatten()))


def _activation_factors(mlp: Any) -> tuple[float, float]:
    """Return the factors that xIELU has learned, of positive and of negative numbers; 1 for other functions."""
    function: Any = getattr(mlp, "act_fn", None)
    if not hasattr(function, "alpha_p"):
        return 1.0, 1.0
    above, below = (float(F.softplus(each.detach().float())) for each in (function.alpha_p, function.alpha_n))
    return above, below + float(function.beta)


def _kept(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """`linear_of` in place of a layer of another dtype too, whether it gains or not."""
    return linear_of(weight, bias, dtype)


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

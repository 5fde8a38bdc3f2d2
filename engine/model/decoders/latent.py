"""Attention over latents: multi-head latent attention (arXiv:2405.04434).

The first product of such a layer yields the queries or their latent, the latent of keys and values, and the rotary part
that all keys of a row share. The pool keeps the normed latent and this part: one key for all heads, whose first numbers
are the value. Stock modules multiply each latent by `kv_b_proj` instead, [keys; values] of all heads:

    score = (K_h c) q + k q'  =  c (K_h^T q) + k q'          result = sum of w (V_h c)  =  V_h (sum of w c)

So queries are multiplied by a factor before the attention, and its results by another after it (section 2.1.2). Every
row goes this way, in prompts too: a row's bits do not depend on the pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.backend import is_triton
from engine.attention.base import PlanAttention
from engine.config import KVDtype
from engine.kv_cache.pool import LayerShape
from engine.model.attention_probe import LayerRecord
from engine.model.checkpoint.unread_weight import read_weight
from engine.model.decoders.head_products import HeadProducts
from engine.model.decoders.row_operations import NativeRows, RowOperations, row_operations
from engine.model.linear.native_product import PackedWeight
from engine.model.linear.native_quantized import packed_weight_of
from engine.model.linear.packed_linear import Linear
from protos.errors import ConfigError

_Take = Callable[[str, list[nn.Linear], Tensor | None], Linear]


class LatentCall(ctypes.Structure):
    """`struct latent` of engine/native/latent/latent.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, PackedWeight) for name in ("queries", "keys", "values")),
        ("epsilon", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class Latent:
    """The norms and products of a layer after its first product.

    Attributes:
        queries: the product of the queries' latent; None if the first product yields the queries.
        query_norm: the weight of that latent's norm.
        keys: the factor of a query's plain part, in each head.
        values: the factor of the attention's results, in each head.
        key_norm: the weight of the norm of the latent of keys and values.
        num_plain_dims: the first dims of a query, which are not rotated.
        num_rotated_dims: its other dims.
        epsilon: the number added to the variance in the norms.
    """

    queries: Linear | None
    query_norm: Tensor | None
    keys: HeadProducts
    values: HeadProducts
    key_norm: Tensor
    num_plain_dims: int
    num_rotated_dims: int
    epsilon: float

    def absorb(self, first: Tensor, angles: Tensor, *, in_pairs: bool) -> tuple[Tensor, Tensor]:
        """Return the queries of rows, [T, heads, rank + R], and their keys as stored, [T, 1, rank + R].

        Args:
            first: the results of the first product, [T, outputs]; may be overwritten.
            angles: [T, 2, R].
            in_pairs: as they are.
        """
        rank, num_rotated = len(self.key_norm), self.num_rotated_dims
        query, latent, shared = first.split((first.shape[1] - rank - num_rotated, rank, num_rotated), dim=1)
        rows = row_operations(rank, self._norm_dims, first, self.epsilon)
        if self.queries is not None:
            assert self.query_norm is not None, "a latent has a norm"
            query = self.queries(rows.norm_heads(query[:, None], 1, self.query_norm[None])[:, 0])
        normed = rows.norm_heads(latent[:, None], 1, self.key_norm[None])[:, 0]
        turned = _rotated(rows, shared[:, None], angles, in_pairs)
        sizes = self.num_plain_dims, num_rotated
        straight, turning = query.unflatten(1, (-1, sum(sizes))).split(sizes, dim=-1)
        queries = torch.cat((self.keys(straight), _rotated(rows, turning, angles, in_pairs)), dim=-1)
        return queries, torch.cat((normed[:, None], turned), dim=-1)

    def call(self, dtype: torch.dtype) -> LatentCall | None:
        """Return the latents for the kernel, valid as long as this; None where it takes others."""
        like, factors = torch.empty(0, dtype=dtype), (self.keys, self.values)
        queries = PackedWeight() if self.queries is None else packed_weight_of(self.queries, dtype)
        weights = [queries, *(factor.packed_weight(dtype) for factor in factors)]
        if None in weights or not NativeRows.fit(len(self.key_norm), self._norm_dims, like):
            return None
        norms = None if self.query_norm is None else self.query_norm.data_ptr(), self.key_norm.data_ptr()
        return LatentCall(*norms, *weights, self.epsilon)

    @property
    def _norm_dims(self) -> tuple[int, int]:
        """Sizes for `row_operations`: of the latent of queries, if there is one, and of the rotary part."""
        return len(self.key_norm if self.query_norm is None else self.query_norm), self.num_rotated_dims


def has_latents(attention: Any) -> bool:
    """True for a stock module of such attention."""
    return hasattr(attention, "kv_b_proj")


def computes_latents(config: Any) -> bool:
    """True for the configuration of a model with such attention."""
    return bool(getattr(config.get_text_config(), "kv_lora_rank", None))


def latents_pay(config: Any) -> bool:
    """True if a token's latent has fewer numbers than its keys and values, as in all published models."""
    return _latent_size(config) < _size_of_heads(config)


def _latent_size(config: Any) -> int:
    return int(config.kv_lora_rank + config.qk_rope_head_dim)


def _size_of_heads(config: Any) -> int:
    expanded = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return int(config.num_attention_heads * expanded)


def latent_note(config: Any, *, is_described: bool, num_ranks: int, is_on_gpu: bool) -> str | None:
    """Return the form that the cache keeps of a model with such attention, and the reason; None for others.

    `is_described` is true for a model of a family whose layers our decoder computes.
    """
    if not computes_latents(config):
        return None
    text = config.get_text_config()
    of_latent, of_heads = _latent_size(text), _size_of_heads(text)
    kept = f"the cache keeps the keys and values of all heads, {of_heads:,} numbers a token and layer, not latents"
    if not latents_pay(text):
        return f"{kept}, which have {of_latent:,}"
    if not is_described:
        return f"{kept} of {of_latent:,}, since model type {text.model_type!r} runs module by module"
    if num_ranks > 1:
        return f"{kept} of {of_latent:,}, since each of {num_ranks} ranks has its own heads"
    if is_on_gpu:
        return f"{kept} of {of_latent:,}, since no kernel for GPUs reads them"
    return f"the cache keeps latents, {of_latent:,} numbers a token and layer, not {of_heads:,} of keys and values"


def latent_records(model: PreTrainedModel, records: Seq[LayerRecord]) -> list[LayerRecord]:
    """Return the records of a model's layers with latents in the pool where the attention has them."""
    modules: Iterable[Any] = model.modules()
    attentions = {module.layer_idx: module for module in modules if has_latents(module)}
    return [
        replace(record, shape=_latent_shape(attentions[record.layer])) if record.layer in attentions else record
        for record in records
    ]


def _latent_shape(attention: Any) -> LayerShape:
    rank = attention.kv_lora_rank
    return LayerShape(1, rank + attention.qk_rope_head_dim, rank, is_latent=True)


def check_latents(kind: KVDtype, plan_attention: PlanAttention, model_type: str) -> None:
    """Check that a pool of `kind` takes latents: each number of one is part of every head's key and value.

    Raises:
        ConfigError: it rounds them to 8 bits, or the attention does not read them.
    """
    if is_triton(plan_attention):
        raise ConfigError(
            f"attention is 'triton', which does not read latents, and model type {model_type!r} keeps them in the "
            "cache of a processor; set it to auto"
        )
    if kind is not KVDtype.AUTO:
        raise ConfigError(
            f"cache.dtype is {str(kind)!r}, but model type {model_type!r} keeps latents in the cache, which are not "
            "rounded and take less than keys and values in 8 bits; set it to auto"
        )


def latent_of(attention: Any, take: _Take, keys: HeadProducts, values: HeadProducts) -> Latent:
    """Return the parts next to the attention of a stock module that `has_latents`.

    Args:
        attention: the module.
        take: returns the product in place of layers, by a name, with its outputs in an order.
        keys: the product by `key_factor`.
        values: the product by `value_factor`.
    """
    queries: nn.Linear | None = getattr(attention, "q_b_proj", None)
    order = None if queries is None else _order(attention, queries, attention.qk_head_dim)
    return Latent(
        queries=None if queries is None else take("queries", [queries], order),
        query_norm=None if queries is None else attention.q_a_layernorm.weight,
        keys=keys,
        values=values,
        key_norm=attention.kv_a_layernorm.weight,
        num_plain_dims=attention.qk_nope_head_dim,
        num_rotated_dims=attention.qk_rope_head_dim,
        epsilon=attention.kv_a_layernorm.variance_epsilon,
    )


def factor_sizes(attention: Any) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of `key_factor` and `value_factor`."""
    rank, plain, value = attention.kv_lora_rank, attention.qk_nope_head_dim, attention.v_head_dim
    num_heads = attention.kv_b_proj.out_features // (plain + value)
    return (num_heads, rank, plain), (num_heads, value, rank)


def key_factor(attention: Any) -> Tensor:
    """Return the weight from the plain part of a query to the latent, [heads, rank, plain]."""
    return _factors(attention)[:, : attention.qk_nope_head_dim].transpose(1, 2)


def value_factor(attention: Any) -> Tensor:
    """Return the weight from the latent to a value, [heads, value, rank]."""
    return _factors(attention)[:, attention.qk_nope_head_dim :]


def _factors(attention: Any) -> Tensor:
    weight = read_weight(attention.kv_b_proj.weight)
    return weight.view(-1, attention.qk_nope_head_dim + attention.v_head_dim, weight.shape[1])


def expand(keys: HeadProducts, values: HeadProducts, latents: Tensor) -> Tensor:
    """Return keys without their rotary part and values, as `kv_b_proj` does: [..., rank] -> [..., heads * (K + V)].

    The factors' own numbers are multiplied, so that the stock model has the served weights.
    """
    plain = torch.einsum("...r,phr->...hp", latents.float(), keys.weight()).to(latents.dtype)
    return torch.cat((plain, values.of_all(latents)), dim=-1).flatten(-2)


def first_latents(attention: Any) -> tuple[list[nn.Linear], Tensor | None]:
    """Return the layers of the first product of such a module, and the order of its outputs."""
    latent: nn.Linear | None = getattr(attention, "q_a_proj", None)
    query, last = attention.q_proj if latent is None else latent, attention.kv_a_proj_with_mqa
    order, head_dim = _order(attention, last, last.out_features), attention.qk_head_dim
    if order is not None:
        before = torch.arange(query.out_features) if latent is not None else _order(attention, query, head_dim)
        assert before is not None, "both are rotated"
        order = torch.cat((before, order + query.out_features))
    return [query, last], order


def _order(attention: Any, linear: nn.Linear, head_dim: int) -> Tensor | None:
    """Return an order of a layer's outputs: then halves of the rotated dims turn, not neighbors as in the module.

    Its keys have this order after they are rotated. None where nothing moves.
    """
    if not getattr(attention.config, "rope_interleave", False):
        return None
    places = torch.arange(linear.out_features).view(-1, head_dim)
    first = head_dim - attention.qk_rope_head_dim
    return torch.cat((places[:, :first], places[:, first::2], places[:, first + 1 :: 2]), dim=1).flatten()


def _rotated(rows: RowOperations, heads: Tensor, angles: Tensor, in_pairs: bool) -> Tensor:
    return rows.rotate(heads, heads.shape[1], angles, in_pairs=in_pairs)

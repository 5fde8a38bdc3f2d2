"""Queries, keys and values from latents: multi-head latent attention (arXiv:2405.04434).

The first product of such a layer yields the queries or their latent, the latent of keys and values, and the rotary part
that all keys of a row share. The pool keeps whole keys and values, as it does for other layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.decoders.row_operations import NativeRows, RowOperations, row_operations
from engine.model.linear.native_product import PackedWeight
from engine.model.linear.native_quantized import packed_weight_of
from engine.model.linear.packed_linear import Linear

_Take = Callable[[str, list[nn.Linear], Tensor | None], Linear]


class LatentCall(ctypes.Structure):
    """`struct latent` of engine/native/latent/latent.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, PackedWeight) for name in ("queries", "keys_values")),
        ("value_dim", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class Latent:
    """The norms and products of a layer after its first product.

    Attributes:
        queries: the product of the queries' latent; None if the first product yields the queries.
        query_norm: the weight of that latent's norm.
        keys_values: the product of the latent of keys and values: for each head a key without its rotary part, and a
            value.
        key_norm: the weight of that latent's norm.
        head_dim: the size of a query and a key.
        num_rotated_dims: the number of their last dims that are rotated.
        value_dim: the size of a value.
        epsilon: the number added to the variance in the norms.
    """

    queries: Linear | None
    query_norm: Tensor | None
    keys_values: Linear
    key_norm: Tensor
    head_dim: int
    num_rotated_dims: int
    value_dim: int
    epsilon: float

    def expand(self, first: Tensor, angles: Tensor, *, in_pairs: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of rows, [T, heads, D].

        Args:
            first: the results of the first product, [T, outputs]; may be overwritten.
            angles: [T, 2, R].
            in_pairs: as they are.
        """
        num_rows, rank, num_rotated = len(first), len(self.key_norm), self.num_rotated_dims
        query, latent, shared = first.split((first.shape[1] - rank - num_rotated, rank, num_rotated), dim=1)
        rows = row_operations(rank, self._norm_dims, first, self.epsilon)
        if self.queries is not None:
            assert self.query_norm is not None, "a latent has a norm"
            query = self.queries(rows.norm_heads(query[:, None], 1, self.query_norm[None])[:, 0])
        normed = rows.norm_heads(latent[:, None], 1, self.key_norm[None])[:, 0]
        keys_values = self.keys_values(normed).view(num_rows, -1, self._num_plain_dims + self.value_dim)
        plain, value = keys_values.split((self._num_plain_dims, self.value_dim), dim=-1)
        turned = _rotated(rows, shared[:, None], angles, in_pairs).expand(-1, plain.shape[1], -1)
        straight, turning = query.view(num_rows, -1, self.head_dim).split((self._num_plain_dims, num_rotated), dim=-1)
        queries = torch.cat((straight, _rotated(rows, turning, angles, in_pairs)), dim=-1)
        return queries, torch.cat((plain, turned), dim=-1), value

    def call(self, dtype: torch.dtype) -> LatentCall | None:
        """Return the latents for the kernel, valid as long as this; None where it takes others."""
        products, like = (self.queries, self.keys_values), torch.empty(0, dtype=dtype)
        weights = [PackedWeight() if each is None else packed_weight_of(each, dtype) for each in products]
        if None in weights or not NativeRows.fit(len(self.key_norm), self._norm_dims, like):
            return None
        norms = None if self.query_norm is None else self.query_norm.data_ptr(), self.key_norm.data_ptr()
        return LatentCall(*norms, *weights, self.value_dim, self.epsilon)

    @property
    def _num_plain_dims(self) -> int:
        return self.head_dim - self.num_rotated_dims

    @property
    def _norm_dims(self) -> tuple[int, int]:
        """Sizes for `row_operations`: of the latent of queries, if there is one, and of the rotary part."""
        return len(self.key_norm if self.query_norm is None else self.query_norm), self.num_rotated_dims


def has_latents(attention: Any) -> bool:
    """True for a stock module of such attention."""
    return hasattr(attention, "kv_b_proj")


def latent_of(attention: Any, head_dim: int, take: _Take) -> Latent:
    """Return what follows the first product of a stock module that `has_latents`.

    `take` returns the product in place of layers, by a name, with its outputs in an order.
    """
    queries: nn.Linear | None = getattr(attention, "q_b_proj", None)
    return Latent(
        queries=None if queries is None else take("queries", [queries], _order(attention, queries, head_dim)),
        query_norm=None if queries is None else attention.q_a_layernorm.weight,
        keys_values=take("keys_values", [attention.kv_b_proj], None),
        key_norm=attention.kv_a_layernorm.weight,
        head_dim=head_dim,
        num_rotated_dims=attention.qk_rope_head_dim,
        value_dim=attention.v_head_dim,
        epsilon=attention.kv_a_layernorm.variance_epsilon,
    )


def first_latents(attention: Any, head_dim: int) -> tuple[list[nn.Linear], Tensor | None]:
    """Return the layers of the first product of such a module, and the order of its outputs."""
    latent: nn.Linear | None = getattr(attention, "q_a_proj", None)
    query, last = attention.q_proj if latent is None else latent, attention.kv_a_proj_with_mqa
    order = _order(attention, last, last.out_features)
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

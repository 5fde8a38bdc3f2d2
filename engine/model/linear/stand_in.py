"""Lets the stock model's linear layers multiply by packed weights, so that the check needs no second copy of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor, nn

from engine.model.checkpoint.node_memory import drop_pages
from engine.model.linear.gated_linear import GatedProduct
from engine.model.linear.native_product import compare_product
from engine.model.linear.packed_linear import Linear


def stand_in(
    layers: Mapping[nn.Linear, Linear], dtype: torch.dtype, *, is_exact: bool, is_checked: bool = False
) -> None:
    """Replace each layer's forward by a function of rows of `dtype`, and free its weight.

    Args:
        layers: the function of each layer.
        dtype: of rows.
        is_exact: functions do not round the weight.
        is_checked: functions and layers were compared at an earlier start.

    Raises:
        ConfigError: a function differs from its layer by more than roundings.
    """
    if not is_checked:
        for layer, function in layers.items():
            compare_product(function, layer.weight, layer.bias, dtype, is_exact=is_exact)
        drop_pages(layer.weight for layer in layers)
    for layer, function in layers.items():
        setattr(layer, "forward", function)  # noqa: B010 -- shadows the class's
        layer.weight = None  # type: ignore[assignment]


def slices_of(joined: Linear, layers: Seq[nn.Linear]) -> Iterator[Linear]:
    """Yield each layer's part of a product that joins the outputs of `layers` in order."""
    first = 0
    for layer in layers:
        yield partial(_slice, joined, first, first + layer.out_features)
        first += layer.out_features


def _slice(joined: Linear, first: int, last: int, x: Tensor) -> Tensor:
    return joined(x)[..., first:last]


def halves_of(gated: GatedProduct) -> tuple[Linear, Linear]:
    """Return the gate and up of a gated product."""
    return partial(_half, gated, 0), partial(_half, gated, 1)


def joined_of(parts: Seq[Linear]) -> Linear:
    """Return the product that joins the outputs of `parts` in order."""
    return partial(_join, tuple(parts))


def _join(parts: tuple[Linear, ...], x: Tensor) -> Tensor:
    return torch.cat([part(x) for part in parts], dim=-1)


def reordered(product: Linear, order: Tensor) -> Linear:
    """Return the product with its outputs in another order."""
    return partial(_reorder, product, order)


def _reorder(product: Linear, order: Tensor, x: Tensor) -> Tensor:
    return product(x)[..., order]


def _half(gated: GatedProduct, index: int, x: Tensor) -> Tensor:
    return gated.halves(x)[index]

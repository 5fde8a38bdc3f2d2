"""A product of its own for each head of a row: the factors of attention over latents.

`engine/native/latent/heads.c` computes it where the kernels take the weight of a head. Else each head has a product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.linear.native_product import NativeProduct, PackedWeight
from engine.model.linear.native_quantized import NativeQuantizedProduct, packed_weight_of
from engine.model.linear.packed_experts import check_memory
from engine.model.linear.packed_linear import Linear, LinearFactory
from engine.model.linear.weight_store import OUTPUTS
from engine.native.library import kernel

Packed = Linear | tuple[Linear, ...]  # one weight of ours, with the outputs of all heads; or one of each head


def pack_heads(weight: Tensor, make_linear: LinearFactory) -> Packed:
    """Return the products of `weight` [heads, out, in], which a store can keep."""
    if weight.shape[1] % OUTPUTS == 0:
        together = make_linear(weight.flatten(0, 1), None)
        if isinstance(together, NativeProduct | NativeQuantizedProduct):
            return together
    return tuple(make_linear(each, None) for each in weight)


class HeadProducts:
    """The products of all heads; a row's result does not depend on other rows if the products' do not."""

    def __init__(self, products: Packed, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
        """Take products from `pack_heads`, of a weight of `sizes` [heads, out, in], for rows of `dtype`."""
        self._products, self._sizes, self._dtype = products, sizes, dtype

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, heads, in] -> [T, heads, out]."""
        products, (num_heads, num_outputs, _) = self._products, self._sizes
        if isinstance(products, tuple):
            return torch.stack([product(row) for product, row in zip(products, rows.unbind(1), strict=True)], dim=1)
        weight = self.packed_weight(rows.dtype)
        assert weight is not None, "rows have the dtype of the products"
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = rows.new_empty(len(rows), num_heads, num_outputs)
        places = rows.data_ptr(), *rows.stride()[:2], out.data_ptr(), len(rows), rows.dtype is torch.bfloat16
        check_memory(kernel("heads", "pqpqqpqi", "i")(ctypes.byref(weight), num_heads, *places))
        return out

    def of_all(self, row: Tensor) -> Tensor:
        """[..., in] -> [..., heads, out]: each head multiplies the same numbers."""
        products = self._products if isinstance(self._products, tuple) else (self._products,)
        results: Tensor = torch.cat([product(row) for product in products], dim=-1).unflatten(-1, self._sizes[:2])
        return results

    def weight(self) -> Tensor:
        """Return the numbers that rows are multiplied by, [in, heads, out] float32."""
        dtype = torch.float32 if isinstance(self._products, NativeQuantizedProduct) else self._dtype
        return self.of_all(torch.eye(self._sizes[2], dtype=dtype)).float()

    def packed_weight(self, dtype: torch.dtype) -> PackedWeight | None:
        """Return the weight for the kernel, valid as long as this, with the outputs of one head; None without one."""
        weight = packed_weight_of(self._products, dtype)
        if weight is not None:
            weight.num_outputs //= self._sizes[0]
        return weight


def rowwise_heads(products: Packed, wrap: Callable[[Linear], Linear]) -> Packed:
    """Return `products`, each wrapped."""
    return tuple(map(wrap, products)) if isinstance(products, tuple) else wrap(products)

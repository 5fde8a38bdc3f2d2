"""Norms and rotary embeddings on a GPU, each one launch: a row's result does not depend on other rows.

Import it only where Triton is installed; TRITON_INTERPRET=1, set before the first import, runs it on the processor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.decoders.rotary import rotate
from engine.model.decoders.row_operations import RowOperations

_HEADS = 8  # that one program rotates


@triton.jit
def norm_rows(
    normed,  # [R * GROUP, size]
    total,  # [R, size], with `delta`
    rows,  # [R, row_stride]; the first GROUP * size are normed, in groups
    delta,  # [R, size] or None
    weight,  # [GROUP, size]
    row_stride,
    size,
    epsilon,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and member of its group."""
    row = (tl.program_id(0) // GROUP).to(tl.int64)
    member = tl.program_id(0) % GROUP
    at = tl.arange(0, BLOCK)
    is_there = at < size
    x = tl.load(rows + row * row_stride + member * size + at, mask=is_there, other=0.0)
    if delta is not None:
        added = tl.load(delta + row * size + at, mask=is_there, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * size + at, x, mask=is_there)
    values = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + epsilon)
    factors = tl.load(weight + member * size + at, mask=is_there, other=0.0).to(tl.float32)
    out = normed + tl.program_id(0).to(tl.int64) * size + at
    tl.store(out, (values * scale * factors).to(normed.dtype.element_ty), mask=is_there)


@triton.jit
def rotate_heads(
    rotated,  # [R, GROUP, size]
    heads,  # [R, row_stride]; the first GROUP * size are rotated
    table,  # [R, 2, size]
    row_stride,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and HEADS of its heads, as in `engine.model.decoders.rotary.rotate`."""
    row = tl.program_id(0).to(tl.int64)
    member, at = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    is_there = (member[:, None] < GROUP) & (at[None, :] < SIZE)
    cos = tl.load(table + row * 2 * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    sin = tl.load(table + row * 2 * SIZE + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    other = tl.where(at < SIZE // 2, at + SIZE // 2, at - SIZE // 2)
    first = heads + row * row_stride + member[:, None] * SIZE
    x = tl.load(first + at[None, :], mask=is_there, other=0.0).to(tl.float32)
    swapped = tl.load(first + other[None, :], mask=is_there, other=0.0).to(tl.float32)
    result = x * cos[None, :] + swapped * sin[None, :]
    out = rotated + (row * GROUP + member[:, None]) * SIZE + at[None, :]
    tl.store(out, result.to(rotated.dtype.element_ty), mask=is_there)


class TritonRows(RowOperations):
    """The operations by our kernels."""

    def __init__(self, epsilon: float) -> None:
        """`epsilon` is added to the variance in the norms."""
        self._epsilon = epsilon

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if weight is None:
            total = hidden if delta is None else hidden + delta
            return total, total
        hidden = hidden.contiguous()
        total = hidden if delta is None else torch.empty_like(hidden)
        normed = torch.empty_like(hidden)
        self._norm(normed, total, hidden, None if delta is None else delta.contiguous(), weight[None])
        return total, normed

    def norm_heads(self, heads: Tensor, num_normed: int, weight: Tensor) -> Tensor:
        rows = heads.contiguous().flatten(1)
        normed = heads.new_empty(len(heads), num_normed, heads.shape[-1])
        self._norm(normed, rows, rows, None, weight)
        return normed

    def rotate(self, heads: Tensor, num_rotated: int, table: Tensor, *, in_pairs: bool = False) -> Tensor:
        if in_pairs or table.shape[-1] < heads.shape[-1]:
            return rotate(heads[:, :num_rotated], table, in_pairs=in_pairs)
        rows = heads.contiguous().flatten(1)
        num_rows, size = len(rows), heads.shape[-1]
        rotated = heads.new_empty(num_rows, num_rotated, size)
        with torch.cuda.device_of(rows):
            rotate_heads[(num_rows, triton.cdiv(num_rotated, _HEADS))](
                rotated,
                rows,
                table,
                rows.stride(0),
                GROUP=num_rotated,
                SIZE=size,
                HEADS=_HEADS,
                BLOCK=triton.next_power_of_2(size),
            )
        return rotated

    def _norm(self, normed: Tensor, total: Tensor, rows: Tensor, delta: Tensor | None, weight: Tensor) -> None:
        group, size = weight.shape
        with torch.cuda.device_of(rows):
            norm_rows[(len(rows) * group,)](
                normed,
                total,
                rows,
                delta,
                weight,
                rows.stride(0),
                size,
                self._epsilon,
                GROUP=group,
                BLOCK=triton.next_power_of_2(size),
                num_warps=4 if size <= 1024 else 8,
            )

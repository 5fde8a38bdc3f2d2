"""Norms on a GPU, a row per program of one Triton kernel: a row's sum has one order in any batch.

Import it only where Triton is installed; TRITON_INTERPRET=1, set before the first import, runs it on the processor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.decoders.row_operations import TorchRows


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


class TritonRows(TorchRows):
    """The operations of deterministic models; rotary embeddings have no sums, and are torch's."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
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
            )

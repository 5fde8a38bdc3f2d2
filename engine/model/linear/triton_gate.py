"""`silu(gate) * up` on a GPU in one launch. Import this module only if Triton is installed."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def gate_rows(
    gated,  # [R, size]
    joined,  # [R, 2 * size]: gate and up
    size,
    BLOCK: tl.constexpr,
):
    """`silu(gate) * up`, one program per row and block of it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < size
    gate = tl.load(joined + row * 2 * size + at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(joined + row * 2 * size + size + at, mask=is_there, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(gated + row * size + at, result.to(gated.dtype.element_ty), mask=is_there)


def gate_joined(joined: Tensor) -> Tensor:
    """Return `silu(gate) * up` of gate and up side by side, [..., 2 * size] -> [..., size]."""
    rows = joined.contiguous().view(-1, joined.shape[-1])
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    gated = rows.new_empty(num_rows, size)
    with torch.cuda.device_of(rows):
        gate_rows[(num_rows, triton.cdiv(size, _BLOCK))](gated, rows, size, BLOCK=_BLOCK)
    return gated.view(*joined.shape[:-1], size)

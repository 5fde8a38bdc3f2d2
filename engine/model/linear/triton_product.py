"""Batch-invariant products on a GPU: one Triton kernel with fixed tiles gives a row the same bits in any batch.

    out [M, N] = x [M, K] W^T        a program: 16 rows, 32 outputs, and K from first to last

Libraries choose tiles, and splits of K, by the number of rows, and with them the order of their sums. Here a row is
summed in the order of K. Passes of many rows use taller tiles if a trial at start shows that these give the same bits.
Import it only where Triton is installed; TRITON_INTERPRET=1, set before the first import, runs it on the processor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.triton_attention import operand


@dataclass(frozen=True, slots=True)
class TileSize:
    """A program's part of a product, and its compilation."""

    num_rows: int
    num_outputs: int
    num_inputs: int  # at a time
    num_warps: int
    num_stages: int

    def of_inputs(self, num_inputs: int) -> TileSize:
        """Return the same tile with other steps."""
        return replace(self, num_inputs=num_inputs)


_LOW = TileSize(16, 32, 128, num_warps=4, num_stages=4)
_TALL = TileSize(64, 128, 128, num_warps=8, num_stages=2)  # K in the same steps
_LOW_FLOAT32 = TileSize(16, 32, 32, num_warps=4, num_stages=2)
_TALL_FLOAT32 = TileSize(64, 64, 32, num_warps=8, num_stages=2)


@triton.jit
def multiply(
    out,  # [M, N]
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N] or None
    num_rows,
    num_inputs,
    num_outputs,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile; those that share a tile of the weight are neighbours."""
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    row = tl.program_id(0) % num_row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) // num_row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = row < num_rows, output < num_outputs
    rows = x + row.to(tl.int64)[:, None] * num_inputs
    weights = weight + output.to(tl.int64)[:, None] * num_inputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        is_input = at[None, :] < num_inputs
        left = tl.load(rows + at[None, :], mask=is_row[:, None] & is_input, other=0.0)
        right = tl.load(weights + at[None, :], mask=is_output[:, None] & is_input, other=0.0)
        acc = tl.dot(left.to(OPERAND), tl.trans(right.to(OPERAND)), acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at_out = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


class TritonProduct:
    """`F.linear(x, weight, bias)`, each row's result independent of the others."""

    is_batch_invariant = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out, in] is kept as it is."""
        self._weight, self._bias = weight.detach().contiguous(), bias
        self._dtype, self.num_inputs = weight.dtype, weight.shape[1]
        is_float32 = weight.dtype is torch.float32
        self._low, tall = (_LOW_FLOAT32, _TALL_FLOAT32) if is_float32 else (_LOW, _TALL)
        self._tall = tall if self._are_alike(tall) else None

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        tile = self._low if self._tall is None or len(rows) < 64 else self._tall
        result = self._multiplied(rows, tile)
        return result.view(*x.shape[:-1], result.shape[-1])

    def _multiplied(self, rows: Tensor, tile: TileSize) -> Tensor:
        num_rows, num_inputs = rows.shape
        num_outputs = len(self._weight)
        out = rows.new_empty(num_rows, num_outputs)
        grid = (triton.cdiv(num_rows, tile.num_rows) * triton.cdiv(num_outputs, tile.num_outputs),)
        with torch.cuda.device_of(rows):
            multiply[grid](
                out,
                rows,
                self._weight,
                self._bias,
                num_rows,
                num_inputs,
                num_outputs,
                OPERAND=operand(rows.dtype),
                BLOCK_M=tile.num_rows,
                BLOCK_N=tile.num_outputs,
                BLOCK_K=tile.num_inputs,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        return out

    def _are_alike(self, tall: TileSize) -> bool:
        """True if a tall tile gives random rows the bits of the low one."""
        if not self._weight.is_cuda:
            return False  # nothing to gain
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(tall.num_rows, self.num_inputs, generator=generator).to(self._weight.device, self._dtype)
        return torch.equal(self._multiplied(rows, tall), self._multiplied(rows, self._low))


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

"""Storage of a token's head of D numbers in the KV pool: in the model's dtype, or in one byte each.

    auto   [ D x the model's dtype ]
    int8   [ D x int8 | bfloat16 scale]  66 bytes for D = 64, against 128 in bfloat16; read by attention on processors
    fp8    [ D x float8_e4m3fn ]         +-448, 3 bits of mantissa, no scale; read by our Triton kernel

Numbers beyond float8's range become +-448. Infinity and NaN are read back as infinity or NaN, so an overflow shows.
Storage depends on the token alone, never on its batch, so speculation is exact with respect to the pool.
`engine.attention.backend.check_kv_kind` checks which attention reads which.

An int8 head that is not finite gets the scale NaN and reads back as NaN. Scales are stored with their numbers: blocks
are copied, moved and sent as bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import KVDtype

SCALE_BYTES = torch.bfloat16.itemsize
_TINY = torch.finfo(torch.bfloat16).tiny  # a scale is never zero


def to_int8_heads(heads: Tensor) -> Tensor:
    """Quantize [..., D] of any float -> [..., D + SCALE_BYTES] int8."""
    scales = (heads.abs().amax(dim=-1, keepdim=True).float() / 127).clamp_(min=_TINY).bfloat16()
    scales = scales.where(scales.isfinite(), torch.nan)
    # The scale is rounded, so the largest number may be 128 times the scale.
    numbers = (heads.float() / scales.float()).round_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8)
    return torch.cat((numbers, scales.view(torch.int8)), dim=-1)


def from_int8_heads(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize [..., D + SCALE_BYTES] int8 -> [..., D] of `dtype`."""
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return stored[..., :-SCALE_BYTES].to(dtype).mul_(scales)


_FLOAT8 = torch.float8_e4m3fn
_LARGEST_FLOAT8 = torch.finfo(_FLOAT8).max


def kv_name(kind: KVDtype, dtype: torch.dtype) -> str:
    """Return the name of a pool for a model that computes in `dtype`. Pools of different names exchange no blocks."""
    return str(dtype) if kind is KVDtype.AUTO else f"{dtype} as {kind}"


def memory_dtype(kind: KVDtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the pool's memory; float8 is kept as bytes, which every device can index."""
    return {KVDtype.INT8: torch.int8, KVDtype.FP8: torch.uint8}.get(kind, dtype)


def head_width(kind: KVDtype, dim: int) -> int:
    """Return how many numbers of `memory_dtype` store a head of `dim`."""
    return dim + SCALE_BYTES if kind is KVDtype.INT8 else dim


def head_bytes(kind: KVDtype, dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a stored head of `dim`."""
    return head_width(kind, dim) * memory_dtype(kind, dtype).itemsize


def stored(kind: KVDtype, heads: Tensor) -> Tensor:
    """Encode heads [..., D] of any float as [..., head_width] of `memory_dtype`."""
    if kind is KVDtype.INT8:
        return to_int8_heads(heads)
    if kind is KVDtype.FP8:
        # Clamped here: some versions of torch cast numbers beyond the range to NaN. Infinity times 0 is NaN.
        clamped = heads.clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).add_(heads, alpha=0)
        return clamped.to(_FLOAT8).view(torch.uint8)
    return heads


def loaded(kind: KVDtype, memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the output of `stored` to heads [..., D] of `dtype`."""
    if kind is KVDtype.INT8:
        return from_int8_heads(memory, dtype)
    return memory.view(_FLOAT8).to(dtype) if kind is KVDtype.FP8 else memory


def kernel_view(kind: KVDtype, memory: Tensor) -> Tensor:
    """View the memory in the dtype that a kernel reads."""
    return memory.view(_FLOAT8) if kind is KVDtype.FP8 else memory

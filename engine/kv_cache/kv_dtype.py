"""Storage of each head of each token in the KV pool: its D numbers as the model computes them, or a byte for each.

    auto   [ D x dtype of the model ]
    int8   [ D x int8 | scale]           `engine.kv_cache.int8_heads`; the attention on processors reads it
    fp8    [ D x float8_e4m3fn ]         +-448, 3 bits of mantissa, no scale; our Triton kernel reads it

Storage depends on the token alone, never on what is computed beside it, so that speculation is exact with respect
to the pool. `engine.attention.backend.check_kv_kind` says which attention reads which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import KVDtype
from engine.kv_cache.int8_heads import SCALE_BYTES, from_int8_heads, to_int8_heads

_FLOAT8 = torch.float8_e4m3fn
_LARGEST_FLOAT8 = torch.finfo(_FLOAT8).max


def kv_name(kind: KVDtype, dtype: torch.dtype) -> str:
    """Return the name of a pool whose model computes in `dtype`: pools of different names exchange no blocks."""
    return str(dtype) if kind is KVDtype.AUTO else f"{dtype} as {kind}"


def memory_dtype(kind: KVDtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the pool's memory: float8 is kept as bytes, which every device can copy by index."""
    return {KVDtype.INT8: torch.int8, KVDtype.FP8: torch.uint8}.get(kind, dtype)


def head_width(kind: KVDtype, dim: int) -> int:
    """Count the numbers of `memory_dtype` in which a head of `dim` is stored."""
    return dim + SCALE_BYTES if kind is KVDtype.INT8 else dim


def head_bytes(kind: KVDtype, dim: int, dtype: torch.dtype) -> int:
    """Count the bytes of a stored head of `dim`."""
    return head_width(kind, dim) * memory_dtype(kind, dtype).itemsize


def stored(kind: KVDtype, heads: Tensor) -> Tensor:
    """Return heads [..., D] of any float as they are stored, [..., head_width] of `memory_dtype`."""
    if kind is KVDtype.INT8:
        return to_int8_heads(heads)
    if kind is KVDtype.FP8:
        # Saturated here: casts of numbers beyond the range give NaN in some versions of torch.
        return heads.clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(_FLOAT8).view(torch.uint8)
    return heads


def loaded(kind: KVDtype, memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `stored` gave, as heads [..., D] of `dtype`."""
    if kind is KVDtype.INT8:
        return from_int8_heads(memory, dtype)
    return memory.view(_FLOAT8).to(dtype) if kind is KVDtype.FP8 else memory


def kernel_view(kind: KVDtype, memory: Tensor) -> Tensor:
    """Return the same memory as numbers of the dtype that a kernel reads."""
    return memory.view(_FLOAT8) if kind is KVDtype.FP8 else memory

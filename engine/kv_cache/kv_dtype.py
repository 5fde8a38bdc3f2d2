"""Storage of each head of each token in the KV pool: its D numbers as the model computes them, or a byte for each.

    auto   [ D x dtype of the model ]
    int8   [ D x int8 | unit ]           `engine.kv_cache.int8_heads`; the attention on processors reads it
    fp8    [ D x float8_e4m3fn ]         +-448, 3 bits of mantissa, no unit; our Triton kernel reads it

Storage depends on the token alone, never on what is computed beside it, so that speculation is exact with respect
to the pool. `engine.attention.backend.check_kv_kind` says which attention reads which.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from engine.kv_cache.int8_heads import UNIT_BYTES, from_int8_heads, to_int8_heads

_FLOAT8 = torch.float8_e4m3fn
_LARGEST_FLOAT8 = torch.finfo(_FLOAT8).max


class KVDtype(StrEnum):
    """`CacheConfig.dtype`; everything that is different about a pool of another kind."""

    AUTO = "auto"
    INT8 = "int8"
    FP8 = "fp8"

    def name_of(self, dtype: torch.dtype) -> str:
        """Of a pool of this kind whose model computes in `dtype`: pools of different names exchange no blocks."""
        return str(dtype) if self is KVDtype.AUTO else f"{dtype} as {self}"

    def memory_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the pool's memory: float8 is kept as bytes, which every device can copy by index."""
        return {KVDtype.INT8: torch.int8, KVDtype.FP8: torch.uint8}.get(self, dtype)

    def head_width(self, dim: int) -> int:
        """Numbers of `memory_dtype` in which a head of `dim` is stored."""
        return dim + UNIT_BYTES if self is KVDtype.INT8 else dim

    def head_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Bytes of a stored head of `dim`."""
        return self.head_width(dim) * self.memory_dtype(dtype).itemsize

    def stored(self, heads: Tensor) -> Tensor:
        """Heads [..., D] of any float as they are stored, [..., head_width] of `memory_dtype`."""
        if self is KVDtype.INT8:
            return to_int8_heads(heads)
        if self is KVDtype.FP8:
            # Saturated here: casts of numbers beyond the range give NaN in some versions of torch.
            return heads.clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(_FLOAT8).view(torch.uint8)
        return heads

    def loaded(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what `stored` gave, as heads [..., D] of `dtype`."""
        if self is KVDtype.INT8:
            return from_int8_heads(stored, dtype)
        return self.kernel_view(stored).to(dtype) if self is KVDtype.FP8 else stored

    def kernel_view(self, memory: Tensor) -> Tensor:
        """The same memory, as numbers of the dtype that a kernel reads."""
        return memory.view(_FLOAT8) if self is KVDtype.FP8 else memory

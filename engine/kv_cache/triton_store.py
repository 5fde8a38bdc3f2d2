"""Stores the keys and values of a pass on a GPU in one launch. Import this module only if Triton is installed."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_heads(
    keys,  # [N * P, H, D]
    values,  # [N * P, H, D of the values]
    slots,  # [T] int64
    key,  # [T, H, D], any strides but the last
    value,  # [T, H, D of the values]
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and head."""
    row, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    slot = tl.load(slots + row) * NUM_HEADS + head
    new_key = tl.load(key + row * key_row_stride + head * key_head_stride + at, mask=at < KEY_DIM)
    tl.store(keys + slot * KEY_DIM + at, new_key, mask=at < KEY_DIM)
    new_value = tl.load(value + row * value_row_stride + head * value_head_stride + at, mask=at < VALUE_DIM)
    tl.store(values + slot * VALUE_DIM + at, new_value, mask=at < VALUE_DIM)


def store(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write key and value [T, H, D] to `slots` [T] of `keys` and `values` [N * P, H, D], all of one dtype."""
    key, value = (heads if heads.stride(-1) == 1 else heads.contiguous() for heads in (key, value))
    num_rows, num_heads, key_dim = key.shape
    value_dim = value.shape[-1]
    with torch.cuda.device_of(keys):
        store_heads[(num_rows, num_heads)](
            keys,
            values,
            slots,
            key,
            value,
            *key.stride()[:2],
            *value.stride()[:2],
            NUM_HEADS=num_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
            num_warps=1,
        )

"""Keys and values as int8: each head of each token is stored as D numbers and their scale.

    head   [ D x int8 | bfloat16 scale, 2 bytes ]        66 bytes for D = 64, against 128 in bfloat16

Storage depends on the token alone, never on its batch, so speculation is exact with respect to the quantised cache. A
head that is not finite gets the scale NaN and reads back as NaN. Scales are stored with their numbers: blocks are
copied, moved and sent as bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
_LARGEST = 127
_TINY = torch.finfo(torch.bfloat16).tiny  # a scale is never zero


def to_int8_heads(heads: Tensor) -> Tensor:
    """Quantize [..., D] of any float -> [..., D + SCALE_BYTES] int8."""
    scales = (heads.abs().amax(dim=-1, keepdim=True).float() / _LARGEST).clamp_(min=_TINY).bfloat16()
    scales = scales.where(scales.isfinite(), torch.nan)
    # The scale is rounded, so the largest number may be 128 times the scale.
    numbers = (heads.float() / scales.float()).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_(0.0).to(torch.int8)
    return torch.cat((numbers, scales.view(torch.int8)), dim=-1)


def from_int8_heads(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize [..., D + SCALE_BYTES] int8 -> [..., D] of `dtype`."""
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return stored[..., :-SCALE_BYTES].to(dtype).mul_(scales)

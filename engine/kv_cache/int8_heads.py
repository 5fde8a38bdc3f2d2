"""Keys and values as int8: each head of each token by itself, its D numbers followed by the unit they are multiples of.

    head   [ D x int8 | bfloat16 unit, 2 bytes ]        66 bytes for D = 64, which are 128 in bfloat16

Storage depends on the token alone, never on what is computed beside it, so that speculation is exact with respect
to the quantised cache. Units travel with their numbers: blocks are copied, moved and sent as bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_BYTES = 2
_LARGEST = 127
_TINY = torch.finfo(torch.bfloat16).tiny  # a unit is never zero


def to_int8_heads(heads: Tensor) -> Tensor:
    """[..., D] of any float -> [..., D + UNIT_BYTES] int8."""
    units = (heads.abs().amax(dim=-1, keepdim=True).float() / _LARGEST).clamp_(min=_TINY).bfloat16()
    # The unit is rounded, so the largest number may be 128 of them.
    numbers = (heads.float() / units.float()).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return torch.cat((numbers, units.view(torch.int8)), dim=-1)


def from_int8_heads(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D + UNIT_BYTES] int8 -> [..., D] of `dtype`."""
    units = stored[..., -UNIT_BYTES:].contiguous().view(torch.bfloat16)
    return stored[..., :-UNIT_BYTES].to(dtype).mul_(units)

"""Attention by torch's kernels that ignores hidden keys even if they hold NaN or infinity.

Those kernels add a mask to scores and multiply values by weights, and NaN survives both: -inf + NaN and 0 * NaN are
NaN. Blocks keep what their last owner wrote, and a rejected draft may overflow, so hidden keys can hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attend_seen(
    attend: Callable[[Tensor, Tensor], Tensor], query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Return `attend(keys, values)` as if hidden keys were zeros wherever they are not finite, [B, H, Q, D].

    On a processor this costs a look at the result, where a number that entered from a hidden key shows. Elsewhere that
    would wait for the device, so the keys are cleaned in any case.

    Args:
        attend: computes the attention of `query`.
        query: [B, H, Q, D].
        keys: [B, H, S, D].
        values: [B, H, S, D of the values].
        mask: additive, broadcast to [B, H, Q, S]; None where row i sees the keys up to i.
    """
    if query.device.type == "cpu":
        out = attend(keys, values)
        if math.isfinite(out.sum(dtype=torch.float32)):
            return out
    reach = query.float().nan_to_num(0.0, 0.0, 0.0).abs().amax()
    is_finite = (keys.float().abs().sum(dim=-1) * reach).isfinite() & values.isfinite().all(dim=-1)  # [B, H, S]
    keys, values = (_cleaned(numbers, is_finite) for numbers in (keys, values))
    is_seen = _causal(query, keys) if mask is None else mask == 0
    sees_fault = (is_seen & ~is_finite.all(dim=1)[:, None, None]).any(dim=-1)  # [B, 1, Q]
    return attend(keys, values).masked_fill(sees_fault[..., None], math.nan)


def _cleaned(numbers: Tensor, is_finite: Tensor) -> Tensor:
    """Return a copy with non-finite numbers zeroed, in the same layout: another layout may round differently."""
    copy = torch.empty_strided(numbers.shape, numbers.stride(), dtype=numbers.dtype, device=numbers.device)
    return copy.copy_(numbers).masked_fill_(~is_finite[..., None], 0.0)


def _causal(query: Tensor, keys: Tensor) -> Tensor:
    """True where a row sees a key, [Q, S]."""
    return torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril_()

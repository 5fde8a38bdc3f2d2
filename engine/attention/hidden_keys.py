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
    """Return `attend(keys, values)` as if the keys hidden from a row were zeros for this row, [B, H, Q, D].

    A finite result is returned as it is, since a hidden number that entered it would show. If the result is not finite,
    NaN and infinite keys become zeros, and the rows that see one become NaN. A row that is still not finite has a score
    that overflows. It is computed alone with its hidden keys as zeros, so only its own scores decide.

    Args:
        attend: computes the attention of `query`.
        query: [B, H, Q, D].
        keys: [B, H, S, D].
        values: [B, H, S, D of the values].
        mask: additive, broadcast to [B, H, Q, S]; None where row i sees the keys up to i.
    """
    out = attend(keys, values)
    if math.isfinite(out.sum(dtype=torch.float32)):
        return out
    num_batches, _, num_rows, _ = query.shape
    is_seen = _causal(query, keys) if mask is None else mask == 0
    is_seen = is_seen.expand(num_batches, 1, num_rows, keys.shape[2])
    is_finite = keys.isfinite().all(dim=-1) & values.isfinite().all(dim=-1)  # [B, H, S]
    sees_fault = (is_seen & ~is_finite.all(dim=1)[:, None, None]).any(dim=-1)  # [B, 1, Q]
    keys, values = (_cleaned(numbers, is_finite) for numbers in (keys, values))
    out = attend(keys, values)
    overflows = ~(out.isfinite().all(dim=-1) | sees_fault)  # [B, H, Q]
    for row in overflows.flatten(0, 1).any(dim=0).nonzero().flatten().tolist():
        out[:, :, row] = attend(_cleaned(keys, is_seen[:, :, row]), values)[:, :, row]
    return out.masked_fill(sees_fault[..., None], math.nan)


def _cleaned(numbers: Tensor, is_kept: Tensor) -> Tensor:
    """Return a copy with the other keys zeroed, in the same layout: another layout may round differently.

    Dims of stride 0, which repeat one kv head, are cleaned once and repeated again.
    """
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in numbers.stride())
    part = numbers[once]
    copy = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device).copy_(part)
    return copy.masked_fill_(~is_kept[once[:3]][..., None], 0.0).expand(numbers.shape)


def _causal(query: Tensor, keys: Tensor) -> Tensor:
    """True where a row sees a key, [Q, S]."""
    return torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril_()

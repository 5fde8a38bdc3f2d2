"""Hidden states of the target that a head reads; a target without a head computes nothing for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HiddenStateTaps:
    """Hidden states of every row of a pass, their widths side by side: features [T, F].

    `layers` are decoder layers whose input is wanted: n is the output of layer n - 1, and the number of layers that of
    the last one. `is_final` adds, behind them, what the language model's head reads: the states behind the final norm.
    """

    layers: tuple[int, ...] = ()
    is_final: bool = False

    def __bool__(self) -> bool:
        return self.is_final or bool(self.layers)


NO_TAPS = HiddenStateTaps()
# The logit of a token that a head does not know: no chance, but a finite score where a grammar leaves no other.
UNKNOWN = -1e4


def joined(parts: Seq[Tensor]) -> Tensor | None:
    """Tapped states of one pass side by side, [T, F]; None without any."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return torch.cat(tuple(parts), dim=-1)

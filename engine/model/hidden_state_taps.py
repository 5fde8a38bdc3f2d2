"""Hidden states of the target for a head; without a head nothing is computed for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HiddenStateTaps:
    """Hidden states of every row of a pass, concatenated: features [T, F].

    `layers` are decoder layers whose input is tapped: n is the output of layer n - 1, and the number of layers is the
    output of the last. `is_final` appends the input of the language model's head: the states after the final norm.
    """

    layers: tuple[int, ...] = ()
    is_final: bool = False

    def __bool__(self) -> bool:
        return self.is_final or bool(self.layers)


NO_TAPS = HiddenStateTaps()
# The logit of a token outside the head's vocabulary: no chance, but finite, in case a grammar allows no other.
UNKNOWN = -1e4


def joined(parts: Seq[Tensor]) -> Tensor | None:
    """Concatenate the tapped states of one pass, [T, F]; None without any."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return torch.cat(tuple(parts), dim=-1)

"""One process's place among those that compute a model together, and what it exchanges with the others.

Tensor parallelism as in Megatron-LM (arXiv:1909.08053): heads and MLP units are divided among the ranks. The products
before them are cut by outputs, those behind them by inputs, whose results are partial and summed: two sums per layer.

      hidden -> [ q k v of my heads ] -> attention -> [ o of my heads ]  -> sum over ranks -> hidden
      hidden -> [ gate up of my units ] -> silu, mul -> [ down of my units ] -> sum over ranks -> hidden
      hidden -> [ lm_head of my tokens ] -> logits joined over ranks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `index` of `size`; a `Rank()` is alone, and everything it does leaves tensors as they are.

    `device` is where its part of the model lives; None is where the model was loaded. `meet` returns when all ranks
    have loaded their weights: no sum may begin before. Sums and joins need torch.distributed's default group, and every
    rank must ask for the same ones in the same order; one that waits too long raises.
    """

    index: int = 0
    size: int = 1
    device: torch.device | None = None
    meet: Callable[[], None] = field(default=lambda: None, compare=False)

    @property
    def load_device(self) -> torch.device | None:
        """Where weights that are to be divided are read to; None is the configured device."""
        return None if self.size == 1 else torch.device("cpu")

    def outputs(self, weight: Tensor) -> Tensor:
        """This rank's rows of a weight `[out, ...]` (or bias, or norm), on its device; `out` divides by `size`."""
        return self.part(weight, 0)

    def inputs(self, weight: Tensor) -> Tensor:
        """This rank's columns of a weight `[out, in]`, on its device."""
        return self.part(weight, 1)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that is divided along `dim`, on its device."""
        return self.place(tensor.chunk(self.size, dim)[self.index])

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """The bias of a product whose result is summed: one rank alone adds it."""
        return None if bias is None or self.index > 0 else self.place(bias)

    def tokens(self, weight: Tensor) -> Tensor:
        """`outputs` of a vocabulary of any size: zero rows behind it make it divisible."""
        missing = -weight.shape[0] % self.size
        padded = weight if not missing else torch.cat((weight, weight.new_zeros(missing, *weight.shape[1:])))
        return self.outputs(padded)

    def place(self, tensor: Tensor) -> Tensor:
        """`tensor` on this rank's device."""
        return tensor.contiguous() if self.device is None else tensor.to(self.device).contiguous()

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of what all ranks have, in place."""
        if self.size > 1:
            dist.all_reduce(partial)
        return partial

    def join(self, part: Tensor, num_columns: int) -> Tensor:
        """The parts `[..., columns of a rank]` of all ranks side by side, without what is behind `num_columns`."""
        if self.size == 1:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=-1)[..., :num_columns]

    def collect(self, part: Tensor) -> list[Tensor]:
        """On rank 0 the tensors (in main memory, of one shape) of all ranks; elsewhere nothing."""
        if self.size == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.index == 0 else None
        dist.gather(part, parts)
        return parts or []

    def share(self, tensor: Tensor) -> Tensor:
        """What rank 0 has, a tensor in main memory; the others give one of its shape and dtype to be filled."""
        dist.broadcast(tensor, src=0)
        return tensor


ALONE = Rank()

"""One of the processes that compute a model together, and its exchanges with the others.

Tensor parallelism as in Megatron-LM (arXiv:1909.08053): heads and MLP units are sharded over the ranks. The first
products are cut by outputs; the second by inputs, and their partial results are summed: two sums per layer.

      hidden -> [ q k v of my heads ] -> attention -> [ o of my heads ]  -> sum over ranks -> hidden
      hidden -> [ gate up of my units ] -> silu, mul -> [ down of my units ] -> sum over ranks -> hidden
      hidden -> [ lm_head of my tokens ] -> logits joined over ranks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `index` of `size`. A `Rank()` is alone and leaves all tensors unchanged.

    `device` holds its part of the model; None is the device of the loaded model. `barrier` returns when all ranks have
    read their initial data; no sum may begin earlier. Sums and joins need torch.distributed's default group, and every
    rank must make the same calls in the same order; a rank that waits too long raises.
    """

    index: int = 0
    size: int = 1
    device: torch.device | None = None
    barrier: Callable[[], None] = field(default=lambda: None, compare=False)

    @property
    def is_first(self) -> bool:
        """True if this process schedules, samples, and checks the model."""
        return self.index == 0

    @property
    def load_device(self) -> torch.device | None:
        """Device that weights are loaded to before sharding; None for the configured one."""
        return None if self.size == 1 else torch.device("cpu")

    def shard_rows(self, weight: Tensor) -> Tensor:
        """This rank's rows of a weight `[out, ...]` (or bias, or norm), on its device; `out` divides by `size`."""
        return self.shard(weight, 0)

    def shard_columns(self, weight: Tensor) -> Tensor:
        """This rank's columns of a weight `[out, in]`, on its device."""
        return self.shard(weight, 1)

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that is sharded along `dim`, on its device."""
        return self.to_device(tensor.chunk(self.size, dim)[self.index])

    def summed_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias of a summed product; only one rank adds it."""
        return None if bias is None or self.index > 0 else self.to_device(bias)

    def shard_vocab(self, weight: Tensor) -> Tensor:
        """`shard_rows` of a vocabulary of any size; trailing zero rows make it divisible."""
        num_missing = -weight.shape[0] % self.size
        padded = torch.cat((weight, weight.new_zeros(num_missing, *weight.shape[1:]))) if num_missing else weight
        return self.shard_rows(padded)

    def to_device(self, tensor: Tensor) -> Tensor:
        """`tensor` on this rank's device."""
        return tensor.contiguous() if self.device is None else tensor.to(self.device).contiguous()

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum the tensors of all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(partial)
        return partial

    def all_gather(self, part: Tensor, num_columns: int) -> Tensor:
        """Concatenate the parts `[..., columns of a rank]` of all ranks, cut to `num_columns`."""
        if self.size == 1:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=-1)[..., :num_columns]

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return all ranks' tensors (in main memory, of one shape) on rank 0; elsewhere an empty list."""
        if self.size == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.index == 0 else None
        dist.gather(part, parts)
        return parts or []

    def least(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        if self.size == 1:
            return number
        least = torch.tensor([number], device=self.device or "cpu")
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def from_first(self, value: T | None) -> T:
        """Return rank 0's value on every rank; the others' values are ignored."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        assert values[0] is not None, "rank 0 has one"
        return values[0]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor (in main memory); the others pass one of its shape and dtype to be filled."""
        dist.broadcast(tensor, src=0)
        return tensor


ALONE = Rank()

"""Tensor parallelism: the plan that shards a model, and one rank's exchanges with the others.

As in Megatron-LM (arXiv:1909.08053), heads and MLP units are sharded over the ranks. The first products are cut by
outputs; the second by inputs, and their partial results are summed: two sums per layer.

      hidden -> [ q k v of my heads ] -> attention -> [ o of my heads ]  -> sum over ranks -> hidden
      hidden -> [ gate up of my units ] -> silu, mul -> [ down of my units ] -> sum over ranks -> hidden
      hidden -> [ lm_head of my tokens ] -> logits joined over ranks

transformers' plan for a family maps modules and parameters to a style of sharding ("colwise": by outputs); a family
without a plan is refused by name. The families of `engine.model.decoders.fused_decoder` are sharded by its own code in
the same way. For all families the plan names the sizes that the number of ranks must divide. No weights are needed: the
model is built without memory.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.model.checkpoint.unread_weight import keeps_form
from engine.recurrent.stock_functions import keeps_states
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


class ShardStyle(StrEnum):
    """Style of sharding for a linear layer, a parameter or a module; the values are transformers' words."""

    OUTPUTS = "colwise"  # a rank has its outputs
    PACKED_OUTPUTS = "packed_colwise"  # a rank has its outputs of each of two concatenated products
    JOINED_OUTPUTS = "colwise_gather_output"  # a rank computes its outputs and receives all
    INPUTS = "rowwise"  # a rank has only its inputs; the results are summed
    SPLIT_INPUTS = "rowwise_split_input"  # a rank has all inputs and takes its own; the results are summed
    SUM = "moe_tp_experts"  # the module returns a partial result, which is summed


_STYLES = {str(style): style for style in ShardStyle} | {
    "colwise_rep": ShardStyle.JOINED_OUTPUTS,
    "rowwise_rep": ShardStyle.SPLIT_INPUTS,
}
# Whole on every rank: parts for training alone, and tables, since a look-up costs less than summing its result.
_WHOLE_IN_INFERENCE = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"}
_TABLES = {"embedding_rowwise", "embedding_colwise"}
_OF_PARAMETERS = {ShardStyle.OUTPUTS, ShardStyle.PACKED_OUTPUTS, ShardStyle.INPUTS}
_HEAD_COUNTS = ("num_key_value_heads", "num_attention_heads")


def check_divisible(config: PreTrainedConfig, size: int) -> None:
    """Raise ConfigError if a model of this configuration cannot be sharded over `size` ranks."""
    numbers = _sharded_sizes(_without_memory(config), size)
    for name, number in numbers.items():
        if number % size:
            raise ConfigError(
                f"target.tensor_parallel_size is {size}, but it must divide the model's {name} {number}; "
                f"choose one of {', '.join(map(str, _divisors(math.gcd(*numbers.values()))))}"
            )


def shard_plan(model: PreTrainedModel, size: int) -> dict[str, ShardStyle]:
    """Return the styles of linear layers, parameters and modules by name; all others stay whole on every rank.

    Raises:
        ConfigError: the model has recurrent layers, transformers has no plan for the family, or its plan needs an
            unsupported style.
    """
    if keeps_states(model):
        raise not_sharded(model, size, "its recurrent layers are not sharded")
    if not model.config.get_text_config().base_model_tp_plan:
        raise not_sharded(model, size, "transformers has no plan to shard it")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    styles: dict[str, ShardStyle] = {}
    for pattern, word in model.tp_plan.items():
        names = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in filter(names.fullmatch, (*modules, *parameters)):
            if word not in _WHOLE_IN_INFERENCE | _TABLES:
                styles[name] = _style(model, size, name, word, modules.get(name))
    return styles


def not_sharded(model: PreTrainedModel, size: int, reason: str) -> ConfigError:
    """Return the error for a family that runs only on one device."""
    return ConfigError(
        f"target.tensor_parallel_size is {size}, but model type {model.config.model_type!r} runs on one device: "
        f"{reason}; set it to 1"
    )


def _without_memory(config: PreTrainedConfig) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ConfigError(f"model type {config.model_type!r} cannot be built: {error}") from error
    return model


def _style(model: PreTrainedModel, size: int, name: str, word: str, module: nn.Module | None) -> ShardStyle:
    style = _STYLES.get(word)
    if module is None:
        is_done = style in _OF_PARAMETERS
    else:
        is_done = style is ShardStyle.SUM or (style is not None and type(module) is nn.Linear)
    if style is None or not is_done:
        kind = "a parameter" if module is None else f"a {type(module).__name__}"
        raise not_sharded(model, size, f"transformers' plan shards {name}, {kind}, by {word!r}, which is not supported")
    return style


def _sharded_sizes(model: PreTrainedModel, size: int) -> Mapping[str, int]:
    """Return all sizes that the number of ranks must divide, by name; heads first, as users know them."""
    plan = shard_plan(model, size)
    numbers: dict[str, int] = {}
    if any(style is ShardStyle.OUTPUTS and "att" in name for name, style in plan.items()):
        config = model.config.get_text_config()
        counts = {name: getattr(config, name, None) for name in _HEAD_COUNTS}
        numbers |= {name: count for name, count in counts.items() if isinstance(count, int)}
    weights = dict(model.named_parameters())
    for name, style in plan.items():
        if style not in (ShardStyle.SUM, ShardStyle.JOINED_OUTPUTS):  # the last rank's outputs may be fewer
            tensor = weights[name] if name in weights else weights[f"{name}.weight"]
            numbers[f"{name} of width"] = _width(tensor, style)
    return numbers


def _width(tensor: Tensor, style: ShardStyle) -> int:
    """Return the number of inputs or outputs of a weight [..., out, in], or elements of [out], that ranks divide."""
    if style in (ShardStyle.INPUTS, ShardStyle.SPLIT_INPUTS) or tensor.ndim == 1:
        return tensor.shape[-1]
    return tensor.shape[-2] // 2 if style is ShardStyle.PACKED_OUTPUTS else tensor.shape[-2]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


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
        parts = (tensor,) if self.size == 1 and keeps_form(tensor) else tensor.chunk(self.size, dim)
        return self.to_device(parts[self.index])

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
            sums = small_sums(dist.group.WORLD) if partial.is_cuda else None
            if sums is None or not sums.add(partial):
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


class SmallSums:
    """Sums of a few rows by one kernel of torch that reads the memory of all ranks, sooner than NCCL has begun.

    Each rank adds in the order of the ranks, at any size and place (`load_and_reduce` in torch's
    CUDASymmetricMemory-inl.cuh). So all ranks have the same bits, and a row's do not depend on its batch.

    Args:
        shared: float32 memory that every rank can read; larger tensors are not summed.
        sum_by: copies its second tensor to the first, which is in shared memory, and overwrites it with the sum of all
            ranks' copies.
    """

    def __init__(self, shared: Tensor, sum_by: Callable[[Tensor, Tensor], object]) -> None:
        self._shared = shared
        self._sum_by = sum_by

    def add(self, partial: Tensor) -> bool:
        """Sum the tensors of all ranks in place; False, and nothing is done, if the kernel does not take them."""
        unit = 16  # bytes that a thread reads at once
        is_whole = partial.nbytes % unit == 0 and partial.storage_offset() * partial.itemsize % unit == 0
        is_small = 0 < partial.nbytes <= self._shared.nbytes
        if not (is_whole and is_small and partial.is_contiguous() and partial.dtype in (torch.bfloat16, torch.float32)):
            return False
        self._sum_by(self._shared.view(partial.dtype)[: partial.numel()].view(partial.shape), partial)
        return True


@cache
def small_sums(group: dist.ProcessGroup) -> SmallSums | None:
    """Return a group's `SmallSums`; None, which is logged, where its GPUs cannot read each other's memory.

    All ranks must make the first call together, and not while a pass is recorded.
    """
    sums, problem = _open_sums(group)
    if _all_agree(not problem) and sums is not None:  # else our kernel would wait for a rank that has none
        found = torch.full((8,), group.rank() + 1.0, dtype=torch.bfloat16, device="cuda")
        expected = group.size() * (group.size() + 1) / 2
        is_right = sums.add(found) and found.tolist() == [expected] * 8
        if _all_agree(is_right):
            return sums
        problem = problem or "a sum was wrong"
    logger.info("NCCL sums small messages between ranks too: %s", problem or "another rank has no access")
    return None


def _open_sums(group: dist.ProcessGroup) -> tuple[SmallSums | None, str]:
    """Return a group's sums, or None and why it has none."""
    own = torch.cuda.current_device()
    if not all(torch.cuda.can_device_access_peer(own, other) for other in range(group.size()) if other != own):
        return None, f"GPU {own} has no access to the memory of all others"
    num_bytes = 1 << 18  # where reading from all ranks begins to cost more than NCCL does
    try:
        from torch.distributed import _symmetric_memory  # private to torch

        shared = _symmetric_memory.empty(num_bytes // 4, dtype=torch.float32, device=torch.device("cuda", own))
        _symmetric_memory.rendezvous(shared, group.group_name)
        kernel = torch.ops.symm_mem.one_shot_all_reduce_copy_out
    except (ImportError, AttributeError, RuntimeError) as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return SmallSums(shared, lambda copy, partial: kernel(copy, partial, "sum", group.group_name, partial)), ""


def _all_agree(is_so: bool) -> bool:
    """True if it is so on all ranks."""
    least = torch.tensor([int(is_so)], device="cuda")
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least)

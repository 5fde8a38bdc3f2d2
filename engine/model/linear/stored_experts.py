"""Weights of experts that stay in a checkpoint's files until their layer is packed.

Most checkpoints have a tensor for each expert, and transformers copies them all into one parameter per layer: all
experts of a model together would be in memory before the first one is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from engine.model.checkpoint.completeness import refuse_not_finite_tensor
from engine.model.checkpoint.node_memory import drop_pages

_Columns = list[list[Tensor]]  # a list of all gates, a list of all ups
_is_storing: ContextVar[bool] = ContextVar("is_storing", default=False)


class StoredWeight(nn.Parameter):
    """A parameter [expert, out, in] without numbers of its own: it has the shape and dtype alone, and shows zeros."""

    _columns: _Columns
    _source: tuple[str, str]  # the parameter's name and the checkpoint

    @classmethod
    def of(cls, columns: _Columns, name: str, path: str) -> StoredWeight | None:
        """Return the stacked experts, each with its columns one after the other; None where shapes differ."""
        first = columns[0][0]
        kinds = {(each.shape, each.dtype) for column in columns for each in column}
        if first.ndim != 2 or len(kinds) != 1 or len({len(column) for column in columns}) != 1:
            return None
        (num_outputs, num_inputs), dtype = first.shape, first.dtype
        zeros = torch.zeros((), dtype=dtype).expand(len(columns[0]), len(columns) * num_outputs, num_inputs)
        stored = cls(zeros, requires_grad=False)
        stored._columns, stored._source = columns, (name, path)
        return stored

    def read(self) -> Tensor:
        """Return the numbers in the checkpoint, whose pages are dropped."""
        numbers = torch.empty(self.shape, dtype=self.dtype)
        for index, column in enumerate(self._columns):
            height = column[0].shape[0]
            for expert, part in enumerate(column):
                numbers[expert, index * height : (index + 1) * height] = part
            drop_pages(column)
        refuse_not_finite_tensor(numbers, *self._source)
        return numbers


def read_weight(weight: Tensor) -> Tensor:
    """Return a weight with its numbers.

    Raises:
        ConfigError: a stored one is NaN or infinite somewhere.
    """
    return weight.read() if isinstance(weight, StoredWeight) else weight


def read_parameters(module: nn.Module) -> None:
    """Replace the stored weights of `module` itself by parameters with their numbers; raises as `read_weight`."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, StoredWeight):
            setattr(module, name, nn.Parameter(parameter.read(), requires_grad=False))


@contextmanager
def storing_experts() -> Iterator[None]:
    """Within it, this thread's models are loaded with stored weights of experts."""
    _wrap()
    token = _is_storing.set(True)
    try:
        yield
    finally:
        _is_storing.reset(token)


@cache
def _wrap() -> None:
    """Let transformers' conversion of a layer's experts return stored weights within `storing_experts`."""
    convert = WeightConverter.convert

    def stored(self: WeightConverter, layer_name: str, *arguments: Any, **keywords: Any) -> Any:
        target = self.target_patterns[0]
        if not _is_storing.get() or not _stacks(self) or target not in layer_name or "*" in layer_name:
            return convert(self, layer_name, *arguments, **keywords)
        parts = self.materialize_tensors()
        columns = [parts[name] for name in self.source_patterns if name in parts]
        weight = StoredWeight.of(columns, layer_name, keywords["model"].config.name_or_path)
        if weight is not None:
            return {layer_name: weight}
        self.collected_tensors = parts
        return convert(self, layer_name, *arguments, **keywords)

    WeightConverter.convert = stored


def _stacks(converter: WeightConverter) -> bool:
    """True if all that a conversion does is to stack experts, and to put the tensors of each side by side."""
    first, *others = converter.operations
    is_joined = len(others) == 1 and isinstance(others[0], Concatenate) and others[0].dim == 1
    is_stacked = isinstance(first, MergeModulelist) and first.dim == 0 and (is_joined or not others)
    is_one = len(converter.target_patterns) == 1 and (is_joined or len(converter.source_patterns) == 1)
    return is_stacked and is_one and converter.quantization_operation is None

"""Weights that stay in a checkpoint's files: every use reads their numbers, and nothing keeps them.

transformers loads a model with them as with tensors, so that memory holds one weight at a time: it is read, packed and
forgotten. The numbers come from the files, dequantized where they have few bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from engine.model.checkpoint.completeness import refuse_not_finite_tensor
from engine.model.checkpoint.node_memory import drop_pages

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_CONVERTED = torch.ops.aten._to_copy.default
_Columns = list[list[Tensor]]  # a list of all gates, a list of all ups
_is_storing: ContextVar[bool] = ContextVar("is_storing", default=False)


class UnreadWeight(Tensor):
    """A tensor that has a shape and a dtype; operations get the numbers that a function reads."""

    _numbers: Callable[[], Tensor]
    _source: tuple[str, str]  # the weight's name and the checkpoint
    _stored_dtype: torch.dtype

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        numbers: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        source: tuple[str, str],
        strides: tuple[int, ...] | None = None,
    ) -> UnreadWeight:
        """Stand for what `numbers` returns, of this shape and dtype; `source` is its name and the checkpoint's."""
        weight = Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype)
        weight._numbers, weight._source, weight._stored_dtype = numbers, source, dtype
        return weight

    def read(self) -> Tensor:
        """Return the numbers, rounded to the dtype.

        Raises:
            ConfigError: one is NaN or infinite.
        """
        numbers = self._numbers().to(self.dtype)
        if numbers.is_floating_point():
            refuse_not_finite_tensor(numbers, *self._source)
        return numbers

    def as_stored(self) -> UnreadWeight:
        """Return the weight before its dtype was changed."""
        return UnreadWeight(self._numbers, self.shape, self._stored_dtype, self._source, self.stride())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnreadWeight({self._source[0]}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, keywords = args[0], kwargs or {}
        is_stored = isinstance(first, cls) and first.dtype is first._stored_dtype  # or it would not be rounded twice
        if func in _SAME or (func is _CONVERTED and is_stored and _changes_dtype_only(keywords)):
            return first._as(keywords.get("dtype") or first.dtype)
        return func(*tree_map_only(cls, cls.read, args), **tree_map_only(cls, cls.read, keywords))

    def _as(self, dtype: torch.dtype) -> UnreadWeight:
        converted = UnreadWeight(self._numbers, self.shape, dtype, self._source, self.stride())
        converted._stored_dtype = self._stored_dtype
        return converted


def _changes_dtype_only(keywords: dict[str, Any]) -> bool:
    return set(keywords) <= {"dtype", "device"} and torch.device(keywords.get("device") or "cpu").type == "cpu"


def stacked(columns: _Columns, source: tuple[str, str]) -> UnreadWeight | None:
    """Return all experts of a layer, [expert, out, in], each with its columns side by side; None if shapes differ."""
    exact = [[each.as_stored() if isinstance(each, UnreadWeight) else each for each in column] for column in columns]
    first = exact[0][0]
    kinds = {(each.shape, each.dtype) for column in exact for each in column}
    if first.ndim != 2 or len(kinds) != 1 or len({len(column) for column in exact}) != 1:
        return None
    shape = len(exact[0]), len(exact) * first.shape[0], first.shape[1]
    return UnreadWeight(partial(_read_stacked, exact, shape), shape, first.dtype, source)._as(columns[0][0].dtype)


def _read_stacked(columns: _Columns, shape: tuple[int, ...]) -> Tensor:
    numbers = torch.empty(shape, dtype=columns[0][0].dtype)
    for index, column in enumerate(columns):
        height = column[0].shape[0]
        for expert, part in enumerate(column):
            numbers[expert, index * height : (index + 1) * height] = read_weight(part)
        drop_pages(part for part in column if not isinstance(part, UnreadWeight))
    return numbers


def read_weight(weight: Tensor) -> Tensor:
    """Return a weight with its numbers.

    Raises:
        ConfigError: an unread one is NaN or infinite somewhere.
    """
    return weight.read() if isinstance(weight, UnreadWeight) else weight


def read_parameters(module: nn.Module) -> None:
    """Replace the unread weights of `module` itself by parameters with their numbers; raises as `read_weight`."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, UnreadWeight):
            setattr(module, name, nn.Parameter(parameter.read(), requires_grad=False))


def replace_unread(model: nn.Module, function: Callable[[UnreadWeight], Tensor]) -> None:
    """Replace each unread parameter of `model` by `function` of it, one by one; tied ones stay tied."""
    changed: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, UnreadWeight):
                if parameter not in changed:
                    changed[parameter] = nn.Parameter(function(parameter), requires_grad=False)
                setattr(module, name, changed[parameter])


@contextmanager
def storing_experts() -> Iterator[None]:
    """Within it, this thread's models are loaded with unread weights of experts."""
    _wrap()
    token = _is_storing.set(True)
    try:
        yield
    finally:
        _is_storing.reset(token)


@cache
def _wrap() -> None:
    """Let transformers' conversion of a layer's experts return unread weights within `storing_experts`."""
    convert = WeightConverter.convert

    def stored(self: WeightConverter, layer_name: str, *arguments: Any, **keywords: Any) -> Any:
        target = self.target_patterns[0]
        if not _is_storing.get() or not _stacks(self) or target not in layer_name or "*" in layer_name:
            return convert(self, layer_name, *arguments, **keywords)
        parts = self.materialize_tensors()
        columns = [parts[name] for name in self.source_patterns if name in parts]
        weight = stacked(columns, (layer_name, keywords["model"].config.name_or_path))
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

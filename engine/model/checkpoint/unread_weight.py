"""Weights that stay in a checkpoint's files and are read at every use.

transformers loads them like tensors. So memory holds one weight at a time, which is read, packed and freed. Weights of
few bits are dequantized when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
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


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Numbers [out, in], integers of few bits or float8; a weight is (number - zero) * scale + base.

    `scales`, `bases` and `zeros` are [rows of scales, groups], each for a group of inputs and `row_step` outputs; None
    means 0. `num_bits` is the width of the numbers of weights that we round.
    """

    numbers: Tensor
    scales: Tensor
    bases: Tensor | None = None
    zeros: Tensor | None = None
    row_step: int = 1
    num_bits: int = 8

    @property
    def group_size(self) -> int:
        """The number of inputs that share a scale."""
        return self.numbers.shape[1] // self.scales.shape[1]

    def dequantized(self) -> Tensor:
        """Return the plain weight, [out, in] float32."""
        groups: Tensor = self.numbers.float().unflatten(1, (self.scales.shape[1], -1))
        groups = groups if self.zeros is None else groups - self._spread(self.zeros)
        groups = groups * self._spread(self.scales)
        return (groups if self.bases is None else groups + self._spread(self.bases)).flatten(1)

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return a copy on a device."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        tensors: dict[str, Any] = {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
        return replace(self, **tensors)

    def first(self, num_outputs: int) -> QuantizedWeight:
        """Return its first outputs; each output has scales of its own."""
        names = ("numbers", "scales", "bases", "zeros")
        parts: dict[str, Any] = {name: getattr(self, name) for name in names}
        parts = {name: None if part is None else part[:num_outputs] for name, part in parts.items()}
        return replace(self, **parts)

    def by_rows(self) -> QuantizedWeight:
        """Return an equal weight with scales for each output."""
        if self.row_step == 1:
            return self
        names, rows = ("scales", "bases", "zeros"), torch.arange(len(self.numbers), device=self.scales.device)
        parts = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(self, **{name: part[rows // self.row_step] for name, part in parts.items()}, row_step=1)

    def _spread(self, values: Tensor) -> Tensor:
        rows = torch.arange(len(self.numbers), device=values.device) // self.row_step
        return values.float()[rows, :, None]


def joined_quantized(parts: Seq[QuantizedWeight]) -> QuantizedWeight | None:
    """Concatenate the outputs of weights; None if they are stored in different forms."""
    step = parts[0].row_step
    if any(part.row_step != step or len(part.numbers) % step for part in parts):
        parts = [part.by_rows() for part in parts]
    kinds = {(part.numbers.dtype, part.scales.dtype, part.scales.shape[1], part.bases is None) for part in parts}
    if len(kinds) > 1:
        return None
    if any(part.zeros is not None for part in parts):
        none = [part.scales.new_zeros(part.scales.shape) if part.zeros is None else part.zeros for part in parts]
        parts = [replace(part, zeros=zeros) for part, zeros in zip(parts, none, strict=True)]
    bases, zeros = ([getattr(part, name) for part in parts] for name in ("bases", "zeros"))
    return replace(
        parts[0],
        numbers=torch.cat([part.numbers for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        bases=None if bases[0] is None else torch.cat(bases),
        zeros=None if zeros[0] is None else torch.cat(zeros),
        num_bits=max(part.num_bits for part in parts),
    )


class UnreadWeight(Tensor):
    """A tensor with a shape and a dtype whose numbers are read for each operation."""

    _numbers: Callable[[], Tensor]
    _source: tuple[str, str]  # the weight's name and the checkpoint
    _stored_dtype: torch.dtype
    _stored: Callable[[], QuantizedWeight | None] | None  # the numbers before they are dequantized
    _keeps_form: bool  # a kernel may ask for these

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        numbers: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        source: tuple[str, str],
        strides: tuple[int, ...] | None = None,
        *,
        stored: Callable[[], QuantizedWeight | None] | None = None,
        device: torch.device | None = None,
    ) -> UnreadWeight:
        """Wrap `numbers`, which returns a tensor of this shape and dtype; the weight reports `device`.

        `source` is the weight's name and the checkpoint's. `stored`, if given, returns the quantized weight.
        """
        weight = Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype, device=device or torch.device("cpu"))
        weight._numbers, weight._source, weight._stored_dtype = numbers, source, dtype
        weight._stored, weight._keeps_form = stored, False
        return weight

    def read(self) -> Tensor:
        """Return the numbers, rounded to the dtype.

        Raises:
            ConfigError: one is NaN or infinite.
        """
        stored = self.quantized()  # a GPU dequantizes sooner than the processor
        numbers = (self._numbers() if stored is None else stored.dequantized()).to(self.device, self.dtype)
        if numbers.is_floating_point():
            refuse_not_finite_tensor(numbers, *self._source)
        return numbers

    def quantized(self) -> QuantizedWeight | None:
        """Return the quantized weight if it is stored in few bits and a kernel takes these (`on`).

        Raises:
            ConfigError: a scale or a float8 is NaN or infinite.
        """
        stored = self._stored() if self._keeps_form and self._stored is not None else None
        if stored is None:
            return None
        for part in (stored.scales, stored.numbers):
            if part.is_floating_point():
                refuse_not_finite_tensor(part.float(), *self._source)
        return stored.to(self.device)

    @property
    def has_form(self) -> bool:
        """True if the files store it in few bits that `quantized` can return."""
        return self._stored is not None

    def on(self, device: torch.device) -> UnreadWeight:
        """Return the weight for kernels on a device, which read its few bits."""
        weight = self._copy(self.dtype, self._stored_dtype, device)
        weight._keeps_form = True
        return weight

    def as_stored(self) -> UnreadWeight:
        """Return the weight before its dtype was changed."""
        return self._copy(self._stored_dtype, self._stored_dtype, self.device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnreadWeight({self._source[0]}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, keywords = args[0], kwargs or {}
        is_stored = isinstance(first, cls) and first.dtype is first._stored_dtype  # or it would not be rounded twice
        if func in _SAME or (func is _CONVERTED and is_stored and _changes_dtype_only(first, keywords)):
            return first._as(keywords.get("dtype") or first.dtype)
        return func(*tree_map_only(cls, cls.read, args), **tree_map_only(cls, cls.read, keywords))

    def _as(self, dtype: torch.dtype) -> UnreadWeight:
        return self._copy(dtype, self._stored_dtype, self.device)

    def _copy(self, dtype: torch.dtype, stored_dtype: torch.dtype, device: torch.device) -> UnreadWeight:
        strides, stored = self.stride(), self._stored
        weight = UnreadWeight(self._numbers, self.shape, dtype, self._source, strides, stored=stored, device=device)
        weight._stored_dtype, weight._keeps_form = stored_dtype, self._keeps_form
        return weight


def _changes_dtype_only(weight: Tensor, keywords: dict[str, Any]) -> bool:
    device = torch.device(keywords.get("device") or weight.device)
    return set(keywords) <= {"dtype", "device"} and device.type == weight.device.type


def joined_weights(weights: Seq[Tensor]) -> Tensor:
    """Concatenate weights [out, in]. If all are unread and for kernels of few bits, the result is unread too."""
    unread = [weight for weight in weights if isinstance(weight, UnreadWeight) and weight._keeps_form]
    if len(unread) < len(weights) or len(weights) == 1:
        return weights[0] if len(weights) == 1 else torch.cat(list(weights))

    def numbers() -> Tensor:
        return torch.cat([weight.read() for weight in unread])

    def stored() -> QuantizedWeight | None:
        parts = [part for weight in unread if (part := weight.quantized()) is not None]
        return joined_quantized(parts) if len(parts) == len(unread) else None

    first = unread[0]
    shape = sum(len(weight) for weight in unread), first.shape[1]
    return UnreadWeight(numbers, shape, first.dtype, first._source, stored=stored, device=first.device).on(first.device)


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


def keeps_form(weight: Tensor) -> bool:
    """True for an unread weight for kernels of few bits (`UnreadWeight.on`)."""
    return isinstance(weight, UnreadWeight) and weight._keeps_form


def has_quantized(model: nn.Module) -> bool:
    """True if `model` has a parameter for kernels of few bits (`UnreadWeight.on`)."""
    return any(map(keeps_form, model.parameters()))


@contextmanager
def storing_experts() -> Iterator[None]:
    """In this block, leave the experts' weights of models that this thread loads unread."""
    _wrap()
    token = _is_storing.set(True)
    try:
        yield
    finally:
        _is_storing.reset(token)


@cache
def _wrap() -> None:
    """Patch transformers' conversion of a layer's experts to return unread weights within `storing_experts`."""
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
    """True if a conversion only stacks experts and concatenates each expert's tensors."""
    first, *others = converter.operations
    is_joined = len(others) == 1 and isinstance(others[0], Concatenate) and others[0].dim == 1
    is_stacked = isinstance(first, MergeModulelist) and first.dim == 0 and (is_joined or not others)
    is_one = len(converter.target_patterns) == 1 and (is_joined or len(converter.source_patterns) == 1)
    return is_stacked and is_one and converter.quantization_operation is None

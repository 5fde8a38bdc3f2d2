"""Stores packed products by name, so that a later start need not make them again.

A store keeps tensors, `Storable` products and tuples of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from engine.model.checkpoint.unread_weight import read_weight

OUTPUTS = 32  # of a pair of tiles
_PART_ELEMENTS = 1 << 18


def parts_of(weight: Tensor) -> tuple[Tensor, ...]:
    """Split a weight [out, in] into parts of whole pairs of tiles; the last part may have fewer outputs."""
    num_outputs = max(1, _PART_ELEMENTS // (weight.shape[1] * OUTPUTS)) * OUTPUTS
    parts: tuple[Tensor, ...] = read_weight(weight).split(num_outputs)
    return parts


def converted(convert: Callable[[Tensor], T], weight: Tensor) -> Iterator[T]:
    """Yield `convert` of each part of `weight`, in order. Each of torch's threads converts a part of its own.

    Several threads on one part would wait for each other longer than the part takes.
    """
    num_threads, parts = torch.get_num_threads(), parts_of(weight)
    torch.set_num_threads(1)
    try:
        yield from map(convert, parts) if min(num_threads, len(parts)) < 2 else _ahead(convert, parts, num_threads)
    finally:
        torch.set_num_threads(num_threads)


def _ahead(convert: Callable[[Tensor], T], parts: tuple[Tensor, ...], num_threads: int) -> Iterator[T]:
    is_inference, results = torch.is_inference_mode_enabled(), deque[Future[T]]()

    def convert_there(part: Tensor) -> T:
        with torch.inference_mode(is_inference), torch.no_grad():  # both belong to a thread
            return convert(part)

    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for part in parts:
            results.append(pool.submit(convert_there, part))
            if len(results) > num_threads:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()


T = TypeVar("T")


class Storable:
    """A product whose attributes can be stored: tensors, numbers, strings, dtypes, storables, and tuples of them."""

    @classmethod
    def of(cls, attributes: dict[str, Any]) -> Self:
        """Return a product with these attributes."""
        product = cls.__new__(cls)
        vars(product).update(attributes)
        return product


class WeightStore:
    """A store that keeps nothing.

    Attributes:
        is_checked: an earlier start has checked that all weights are finite and all products are right.
    """

    is_checked = False

    def product(self, name: str, make: Callable[[], T]) -> T:
        """Return the stored product of this name, or make and store it."""
        return make()

    def has_agreed(self, note: str) -> bool:
        """True if the model agreed with its stock model at an earlier start, under the conditions in `note`."""
        return False

    def agree(self, note: str) -> None:
        """Remember that the model agreed; `note` is one line."""


NO_STORE = WeightStore()


def encoded(value: Any, keep: Callable[[Tensor], int]) -> Any:
    """Return a storable value in JSON's types; `keep` stores a tensor and returns its number.

    Raises:
        TypeError: a part of it cannot be stored.
    """
    match value:
        case Tensor():
            return {"tensor": keep(value)}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case Storable():
            return {"kind": type(value).__name__, "attributes": _each(vars(value), keep)}
        case tuple():
            return {"items": [encoded(each, keep) for each in value]}
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"a {type(value).__name__} cannot be stored")


def _each(attributes: dict[str, Any], keep: Callable[[Tensor], int]) -> dict[str, Any]:
    return {name: encoded(value, keep) for name, value in attributes.items()}


def decoded(value: Any, tensor: Callable[[int], Tensor]) -> Any:
    """Undo `encoded`.

    Raises:
        LookupError: a kind is unknown.
    """
    match value:
        case {"tensor": int(number)}:
            return tensor(number)
        case {"dtype": str(name)}:
            return getattr(torch, name)
        case {"kind": str(kind), "attributes": dict(attributes)}:
            return _kinds()[kind].of({name: decoded(each, tensor) for name, each in attributes.items()})
        case {"items": list(items)}:
            return tuple(decoded(each, tensor) for each in items)
    return value


def _kinds(base: type[Storable] = Storable) -> dict[str, type[Storable]]:
    return {kind.__name__: kind for kind in _subclasses(base)}


def _subclasses(base: type[Storable]) -> Iterator[type[Storable]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)

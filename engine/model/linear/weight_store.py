"""Memory for packed weights, and stores of packed products by name, so that a later start need not make them again.

A pass reads every weight once. With pages of 4 KiB, every 64 cache lines need another entry of the page table, which a
virtual machine translates twice: two cores of a Xeon read 25 GB/s, and 35 GB/s with pages of 2 MiB
(docs/benchmarks.md). Small matrices share a page.

A store keeps tensors, `Storable` products and tuples of them.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from engine.model.checkpoint.unread_weight import read_weight

PAGE_BYTES = 2 << 20
LINE_BYTES = 64  # of the cache
OUTPUTS = 32  # of a pair of tiles
_PART_ELEMENTS = 1 << 18

T = TypeVar("T")

_left = torch.empty(0, dtype=torch.uint8)  # of the newest region; a region is freed with the last tensor in it
_lock = threading.Lock()


def empty_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor in main memory, aligned to a cache line."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = _take(-(-num_bytes // LINE_BYTES) * LINE_BYTES)
    return memory[:num_bytes].view(dtype).view(shape)


def _take(num_bytes: int) -> Tensor:
    """Return so many bytes, a whole number of lines, [num_bytes] uint8."""
    global _left
    with _lock:
        if num_bytes > len(_left):
            _left = _region(max(16 * PAGE_BYTES, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES))  # resident as it fills
        taken, _left = _left[:num_bytes], _left[num_bytes:]
        return taken


def _region(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a Linux without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE_BYTES
    return whole[first : first + num_bytes]


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
            return {
                "kind": type(value).__name__,
                "attributes": {name: encoded(each, keep) for name, each in vars(value).items()},
            }
        case tuple():
            return {"items": [encoded(each, keep) for each in value]}
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"a {type(value).__name__} cannot be stored")


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

"""Counts the bytes of a checkpoint that transformers has read, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import set_tqdm_hook

from engine.model.checkpoint.progress import ProgressReport
from engine.model.checkpoint.weight_files import tensor_headers, weight_files

_LOADING = "Loading weights"  # the description of transformers' bar over parameters


@contextmanager
def reported_reading(folder: Path, model: str) -> Iterator[None]:
    """Report the bytes of the folder's weights while the block loads them, instead of transformers' own bar."""
    previous = set_tqdm_hook(partial(_bar, folder, model))
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _bar(folder: Path, model: str, factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    is_loading = options.get("desc") == _LOADING and args
    return _counted(folder, model, args[0]) if is_loading else factory(*args, **options)


def _counted(folder: Path, model: str, parameters: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield transformers' parameters; a request for the next means that the last has been read."""
    items = list(parameters)
    report = ReadingReport(folder, model, len(items))
    for name, mapping in items:
        yield name, mapping
        report.read(name)
    report.end()


class ReadingReport:
    """Progress of reading a folder's weights, by parameter name.

    A parameter without a tensor of its name (joined experts) counts as the mean of `num_parameters`.
    """

    def __init__(self, folder: Path, model: str, num_parameters: int) -> None:
        self._sizes = {name: math.prod(header.shape) for name, header in tensor_headers(folder).items()}
        self._whole = sum(self._sizes.values()) or 1
        self._mean = self._whole / max(1, num_parameters)
        self._num_read = 0.0
        self._total_bytes = sum(file.stat().st_size for file in weight_files(folder))
        self._report = ProgressReport("reading", model, self._total_bytes)

    def read(self, name: str) -> None:
        """Count a parameter as read."""
        self._num_read += self._sizes.get(name, self._mean)
        self._report.at(int(self._total_bytes * min(1.0, self._num_read / self._whole)))

    def end(self) -> None:
        """Count all remaining bytes."""
        self._report.at(self._total_bytes)

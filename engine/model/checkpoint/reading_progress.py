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
    """Yield transformers' parameters; a request for the next means that the last has been read.

    A parameter without a tensor of its name (joined experts) counts as the mean of all.
    """
    items = list(parameters)
    sizes = {name: math.prod(header.shape) for name, header in tensor_headers(folder).items()}
    whole = sum(sizes.values()) or 1
    mean = whole / max(1, len(items))
    total_bytes = sum(file.stat().st_size for file in weight_files(folder))
    report = ProgressReport("reading", model, total_bytes)
    num_read = 0.0
    for name, mapping in items:
        yield name, mapping
        num_read += sizes.get(name, mean)
        report.at(int(total_bytes * min(1.0, num_read / whole)))
    report.at(total_bytes)

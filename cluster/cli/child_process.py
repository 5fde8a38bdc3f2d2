"""A process for work whose memory is free again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from protos.errors import ConfigError
from protos.linux import die_with_parent

T = TypeVar("T")


def in_child(function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function that a new process calls. The process never outlives this call.

    Raises:
        ConfigError: the process ended without a result.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=die_with_parent) as pool:
            try:
                return pool.submit(function, *arguments).result()
            except BaseException:  # a signal, for instance: the pool would wait for the result
                for child in active_children():
                    child.kill()
                raise
    except BrokenProcessPool:
        raise ConfigError("its process ended; see its log above") from None

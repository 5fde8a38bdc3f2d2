"""Our kernels in C (`engine/native`): compiled when the package is installed, loaded here, optional everywhere.

Where they are missing or the processor lacks what they need, torch computes instead, more slowly.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch  # noqa: F401  # brings the OpenMP that the kernels are linked to

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("native")
SWITCH = "OUTRIDER_NATIVE"  # 0: never load them, to compare


@cache
def native_library() -> ctypes.CDLL | None:
    """The kernels, or None where this process does without; the log says once which and why."""
    try:
        library = _load()
    except _Unavailable as reason:
        logger.info("native kernels: none, torch computes instead: %s", reason)
        return None
    logger.info("native kernels: AMX, from %s", library._name)
    return library


class _Unavailable(Exception):
    pass


def _load() -> ctypes.CDLL:
    if os.environ.get(SWITCH) == "0":
        raise _Unavailable(f"{SWITCH} is 0")
    found = find_spec("engine._native")
    if found is None or found.origin is None:
        raise _Unavailable("they were not compiled when the package was installed, which takes gcc 11 or later on x86")
    if any(source.stat().st_mtime > Path(found.origin).stat().st_mtime for source in _SOURCES.glob("*.c")):
        raise _Unavailable("their sources have changed since they were compiled; install the package again")
    try:
        library = ctypes.CDLL(found.origin)  # one pool of threads with torch's
    except OSError as error:
        raise _Unavailable(str(error)) from error
    if not library.outrider_has_amx():
        raise _Unavailable("this processor, or the kernel above it, has no AMX for bfloat16")
    return library

"""Our kernels in C (`engine/native`): compiled when the package is installed, loaded here, optional everywhere.

They run on AVX-512 with bfloat16, and faster on AMX. Where they are missing or the processor lacks what they need,
torch computes instead, more slowly.
"""

from __future__ import annotations

import ctypes
import logging
import os
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch  # noqa: F401  # brings the OpenMP that the kernels are linked to

from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("native")
SWITCH = "OUTRIDER_NATIVE"  # 0: never load them; avx512: do without AMX; to compare


class Instructions(StrEnum):
    """What the kernels compute with: a sum's last bits depend on it."""

    AVX512 = "AVX-512"
    AMX = "AMX"


_INSTRUCTIONS = (None, Instructions.AVX512, Instructions.AMX)  # `enum processor`
_MAY_USE_TILES = {"": True, "1": True, "avx512": False}


def native_library() -> ctypes.CDLL | None:
    """The kernels, or None where this process does without; the log says once which and why."""
    return _loaded()[0]


def native_instructions() -> Instructions | None:
    """What the kernels use in this process, or None where it does without."""
    return _loaded()[1]


@cache
def _loaded() -> tuple[ctypes.CDLL, Instructions] | tuple[None, None]:
    try:
        library, instructions = _load()
    except _Unavailable as reason:
        logger.info("native kernels: none, torch computes instead: %s", reason)
        return None, None
    logger.info("native kernels: %s, from %s", instructions, library._name)
    return library, instructions


class _Unavailable(Exception):
    pass


def _load() -> tuple[ctypes.CDLL, Instructions]:
    switch = os.environ.get(SWITCH, "")
    if switch == "0":
        raise _Unavailable(f"{SWITCH} is 0")
    if switch not in _MAY_USE_TILES:
        raise ConfigError(
            f"{SWITCH} is {switch!r}; set it to 0 for no kernels, to avx512 for none of AMX, or not at all"
        )
    found = find_spec("engine._native")
    if found is None or found.origin is None:
        raise _Unavailable("they were not compiled when the package was installed, which takes gcc 11 or later on x86")
    if any(source.stat().st_mtime > Path(found.origin).stat().st_mtime for source in _SOURCES.glob("*.[ch]")):
        raise _Unavailable("their sources have changed since they were compiled; install the package again")
    try:
        library = ctypes.CDLL(found.origin)  # one pool of threads with torch's
    except OSError as error:
        raise _Unavailable(str(error)) from error
    instructions = _INSTRUCTIONS[library.outrider_start(_MAY_USE_TILES[switch])]
    if instructions is None:
        raise _Unavailable("this processor has no AVX-512 for bfloat16")
    return library, instructions

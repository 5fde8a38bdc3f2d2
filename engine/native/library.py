"""Loads our C kernels (`engine/native`). They are compiled when the package is installed, and optional.

Kernels of float32 rows need AVX2, kernels of bfloat16 rows need AVX-512 with bfloat16 and are faster on AMX. If the
kernels are missing or the processor lacks these instructions, torch computes instead, more slowly.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from contextlib import suppress
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
SWITCH = "OUTRIDER_NATIVE"  # 0: no kernels; avx2, avx512: at most these instructions; for comparisons


class Instructions(IntEnum):
    """The instructions of the kernels, as in `enum instructions`. The last bits of a sum may depend on them."""

    AVX2 = 1
    AVX512 = 2
    AMX = 3


_MINIMUM = {torch.float32: Instructions.AVX2, torch.bfloat16: Instructions.AVX512}
_LIMITS = {"": Instructions.AMX, "1": Instructions.AMX, "avx512": Instructions.AVX512, "avx2": Instructions.AVX2}


def native_library(minimum: Instructions = Instructions.AVX512) -> ctypes.CDLL | None:
    """Return the kernels, or None if they may not use `minimum`. The instructions in use are logged once."""
    loaded = _loaded()
    return loaded[0] if loaded is not None and loaded[1] >= minimum else None


def kernels_for(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the kernels if they support rows of `dtype`, bfloat16 or float32, otherwise None."""
    minimum = _MINIMUM.get(dtype)
    return None if minimum is None else native_library(minimum)


_TYPES = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


@cache
def kernel(name: str, arguments: str, returned: str | None = None) -> Any:
    """Return a C function; `arguments` has a letter for each: p is a pointer, q an int64, i an int, f a float.

    The caller has seen that this process has the kernels.
    """
    library = native_library(Instructions.AVX2)
    assert library is not None, "callers look for the kernels first"
    function = getattr(library, f"outrider_{name}")
    function.argtypes = [_TYPES[each] for each in arguments]
    function.restype = None if returned is None else _TYPES[returned]
    return function


def native_instructions() -> Instructions | None:
    """Return the instructions in use in this process; None without kernels."""
    loaded = _loaded()
    return None if loaded is None else loaded[1]


def native_digest() -> str:
    """Return a digest of the compiled kernels; empty without kernels."""
    loaded = _loaded()
    return "" if loaded is None else blake2b(Path(loaded[0]._name).read_bytes(), digest_size=8).hexdigest()


@cache
def processor_name() -> str:
    """Name this machine's processor: its model and the instructions that torch uses on it."""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping")
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
        fields = dict(line.split("\t", 1) for line in lines if "\t" in line)
        found = " ".join(fields[name].strip("\t :") for name in names if name in fields)
        return f"{found} {torch.backends.cpu.get_cpu_capability()}"
    return f"{platform.processor()} {torch.backends.cpu.get_cpu_capability()}"


@cache
def _loaded() -> tuple[ctypes.CDLL, Instructions] | None:
    try:
        library, instructions = _load()
    except _NoKernelsError as reason:
        logger.info("native kernels: none, torch computes instead: %s", reason)
        return None
    logger.info("native kernels: %s, from %s", instructions.name, library._name)
    return library, instructions


class _NoKernelsError(Exception):
    pass


def _load() -> tuple[ctypes.CDLL, Instructions]:
    # The user's switch: no kernels, or a limit on instructions.
    switch = os.environ.get(SWITCH, "")
    if switch == "0":
        raise _NoKernelsError(f"{SWITCH} is 0")
    if switch not in _LIMITS:
        raise ConfigError(
            f"{SWITCH} is {switch!r}; set it to 0 for no kernels, avx2 or avx512 for no more than that, or not at all"
        )
    # The compiled library, which must be newer than its sources.
    found = find_spec("engine._native")
    if found is None or found.origin is None:
        raise _NoKernelsError(
            "they were not compiled when the package was installed, which takes gcc 11 or later on x86"
        )
    if any(source.stat().st_mtime > Path(found.origin).stat().st_mtime for source in _SOURCES.rglob("*.[ch]")):
        raise _NoKernelsError("their sources have changed since they were compiled; install the package again")
    try:
        library = ctypes.CDLL(found.origin)  # shares torch's pool of threads
    except OSError as error:
        raise _NoKernelsError(str(error)) from error
    if not (used := library.outrider_start(_LIMITS[switch])):
        raise _NoKernelsError("this processor has no AVX2")
    return library, Instructions(used)


# Converts logits to float32, finds the maximum and checks for finite rows, with our kernels or else with torch.
#
# With a large vocabulary, torch uses all its threads. An OpenMP region waits for all of them, which takes milliseconds
# while the helpers of our kernels occupy the cores.


def widened(logits: Tensor) -> Tensor:
    """Return `logits.float()`."""
    if not _is_ours(logits, torch.bfloat16):
        return logits.float()
    wide = torch.empty_like(logits, dtype=torch.float32)
    kernel("widen", "ppq")(logits.data_ptr(), wide.data_ptr(), logits.numel())
    return wide


def highest(scores: Tensor) -> Tensor:
    """Return `scores.argmax(dim=1)` of `scores` [R, V], [R] int64: the lowest index among equal maxima."""
    num_rows, size = scores.shape
    if not _is_ours(scores, torch.float32) or size == 0:
        return scores.argmax(dim=1)
    chosen = torch.empty(num_rows, dtype=torch.int64)
    has_numbers = kernel("choose", "pqqp", "i")(scores.data_ptr(), num_rows, size, chosen.data_ptr())
    return chosen if has_numbers else scores.argmax(dim=1)


def are_finite(logits: Tensor) -> Tensor:
    """True for each row of `logits` [R, V] with a finite maximum and without NaN, [R] bool; -inf is allowed."""
    num_rows, size = logits.shape
    if not _is_ours(logits, torch.float32) or size == 0:
        return logits.amax(dim=1).isfinite()
    flags = torch.empty(num_rows, dtype=torch.int64)
    kernel("check", "pqqp")(logits.data_ptr(), num_rows, size, flags.data_ptr())
    return flags.bool()


def _is_ours(numbers: Tensor, dtype: torch.dtype) -> bool:
    is_plain = numbers.dtype is dtype and numbers.device.type == "cpu" and numbers.is_contiguous()
    return is_plain and kernels_for(dtype) is not None

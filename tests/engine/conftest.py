"""What several tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.native.library import Instructions, native_instructions, native_library


@pytest.fixture(params=[Instructions.AVX512, Instructions.AMX], ids=lambda each: each.name)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """What our kernels in C compute with, in turn; for tests that `needs_kernels`."""
    with _held_to(request.param):
        yield


@pytest.fixture(params=Instructions, ids=lambda each: each.name)
def any_instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for products of float32 rows, which run on less."""
    with _held_to(request.param):
        yield


@contextmanager
def _held_to(instructions: Instructions) -> Iterator[None]:
    library, best = native_library(Instructions.AVX2), native_instructions()
    assert library is not None
    assert best is not None
    if library.outrider_start(instructions) != instructions:
        pytest.skip(f"no {instructions.name} on this processor")
    yield
    library.outrider_start(best)

"""What several tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.native_library import Instructions, native_instructions, native_library


@pytest.fixture(params=Instructions)
def instructions(request: pytest.FixtureRequest) -> Iterator[Instructions]:
    """What our kernels in C compute with, in turn: AVX-512 alone, and AMX where the processor has it."""
    library, best = native_library(), native_instructions()
    assert library is not None, "for tests that `needs_kernels`"
    if request.param is Instructions.AMX and best is not Instructions.AMX:
        pytest.skip("no AMX on this processor")
    library.outrider_start(request.param is Instructions.AMX)
    yield request.param
    library.outrider_start(best is Instructions.AMX)

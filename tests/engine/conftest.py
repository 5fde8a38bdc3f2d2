"""Fixtures that several tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from engine.native.library import Instructions
from tests.engine.attention.patched_language import patch_once_per_launch
from tests.engine.fixtures.native_kernels import held_to


def pytest_collection_finish() -> None:
    """Speed up the interpreter of the kernels that the collected tests have imported."""
    patch_once_per_launch()


@pytest.fixture(params=[Instructions.AVX512, Instructions.AMX], ids=lambda each: each.name)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Instructions that our kernels in C compute with, in turn; for tests that `needs_kernels`."""
    with held_to(request.param):
        yield


@pytest.fixture(params=Instructions, ids=lambda each: each.name)
def any_instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for kernels that take rows of float32 on less; a test's `dtype` is held to those."""
    if request.param is Instructions.AVX2 and request.node.callspec.params.get("dtype") in (torch.bfloat16, "bfloat16"):
        pytest.skip("no bfloat16 on AVX2")
    with held_to(request.param):
        yield


@pytest.fixture
def dots_without_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of Triton's interpreter give a row the same bits at every place of its tile, as a card's do.

    NumPy's float32 products add the last rows of a tile in another order on some processors, those in float64 too, but
    in bits that rounding to float32 removes.
    """
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="the package triton is not installed")

    def create_dot(_: Any, a: Any, b: Any, d: Any, *_settings: Any) -> Any:
        product = numpy.matmul(a.data, b.data, dtype=numpy.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)

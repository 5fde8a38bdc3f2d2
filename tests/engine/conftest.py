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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip impossible pairs of parameters: our kernels do not support bfloat16 on AVX2."""
    items[:] = [item for item in items if not _is_bfloat16_on_avx2(getattr(item, "callspec", None))]


def _is_bfloat16_on_avx2(callspec: Any) -> bool:
    params = {} if callspec is None else callspec.params
    return params.get("any_instructions") is Instructions.AVX2 and params.get("dtype") in (torch.bfloat16, "bfloat16")


def pytest_collection_finish() -> None:
    """Speed up the interpreter of the kernels that the collected tests have imported."""
    patch_once_per_launch()


@pytest.fixture(params=[Instructions.AVX512, Instructions.AMX], ids=lambda each: each.name)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """The instructions of our C kernels, one after the other; for tests that `needs_kernels`."""
    with held_to(request.param):
        yield


@pytest.fixture(params=Instructions, ids=lambda each: each.name)
def any_instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for kernels that take rows of float32 on less."""
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

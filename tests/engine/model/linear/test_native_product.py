"""Our own products are the plain ones, and a row has the same bits in whatever company it comes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.model.linear.batch_invariant_linear import batch_invariant
from engine.model.linear.native_product import NativeGate, NativeProduct
from engine.model.linear.packed_linear import linear_of
from engine.native.library import Instructions, native_instructions, native_library
from tests.engine.fixtures.native_kernels import (
    needs_float_kernels,
    needs_kernels,
    pairs_split,
    skip_unless_pairs_are_split,
    weights_in_one_stream,
)
from tests.engine.native.native_switch import instructions_used

# Rows around a group of float32 (3, 12), a tile (16), two (32), a block (128, 132); inputs around one of bfloat16 (384)
# and of float32 (512); more pairs of outputs than a block's, by one, and inputs that end within their third block.
ROWS = (0, 1, 2, 3, 4, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 48, 49, 127, 128, 129, 131, 133, 300)
SHAPES = ((32, 32), (64, 352), (96, 384), (320, 544), (2336, 800))  # outputs, inputs


def _weight(num_outputs: int, num_inputs: int) -> torch.Tensor:
    return (torch.randn(num_outputs, num_inputs, generator=_generator()) * num_inputs**-0.5).bfloat16()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_processor_with_avx512_or_amx_has_the_kernels() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    if shutil.which("gcc") is None or not {"avx512_bf16", "avx512_vnni"} <= set(flags):
        pytest.skip("no gcc to compile them, or no AVX-512 for bfloat16 on this processor")
    has_tiles = {"amx_bf16", "amx_int8"} <= set(flags)
    expected = Instructions.AMX if has_tiles else Instructions.AVX512
    assert native_instructions() is expected, "install the package again: `pip install --editable .`"


@needs_kernels
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_the_plain_one(shape: tuple[int, int], has_bias: bool) -> None:
    weight = _weight(*shape)
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None
    multiply = NativeProduct(weight, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).bfloat16()
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        # half a unit of bfloat16's last place, and float32's own error on the way
        torch.testing.assert_close(multiply(x).double(), expected, rtol=2**-8 * 1.01, atol=1e-5)


@needs_float_kernels
@pytest.mark.usefixtures("any_instructions")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_float32_product_by_what_was_bfloat16_is_the_plain_one(shape: tuple[int, int], has_bias: bool) -> None:
    weight = _weight(*shape).float()
    bias = torch.randn(shape[0]) if has_bias else None
    multiply = NativeProduct(weight, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1])
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(multiply(x).double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gate_is_the_plain_one(shape: tuple[int, int], has_bias: bool) -> None:
    gate, up = 4 * _weight(*shape), _weight(*shape).flip(0)
    biases = [torch.randn(shape[0]).bfloat16() if has_bias else None for _ in range(2)]
    multiply = NativeGate(gate, up, *biases)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).bfloat16()
        expected = _gated(x, gate, up, biases)
        torch.testing.assert_close(multiply(x).double(), expected, rtol=2**-8 * 1.1, atol=1e-4)


@needs_float_kernels
@pytest.mark.usefixtures("any_instructions")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_float32_gate_by_what_was_bfloat16_is_the_plain_one(shape: tuple[int, int], has_bias: bool) -> None:
    gate, up = 4 * _weight(*shape).float(), _weight(*shape).float().flip(0)
    biases = [torch.randn(shape[0]) if has_bias else None for _ in range(2)]
    multiply = NativeGate(gate, up, *biases)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1])
        torch.testing.assert_close(multiply(x).double(), _gated(x, gate, up, biases), rtol=1e-5, atol=1e-4)


@needs_kernels
@pytest.mark.usefixtures("instructions")
def test_a_gate_of_any_size_is_finite() -> None:
    x, gated = _extremes(torch.bfloat16)
    torch.testing.assert_close(gated.float(), F.silu(x.float()), rtol=2**-7, atol=1e-35)


@needs_float_kernels
@pytest.mark.usefixtures("any_instructions")
def test_a_float32_gate_of_any_size_is_right_to_the_last_places() -> None:
    x, gated = _extremes(torch.float32)
    torch.testing.assert_close(gated, F.silu(x), rtol=3e-7, atol=1e-35)


def _gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, biases: list[torch.Tensor | None]) -> torch.Tensor:
    gate_bias, up_bias = (None if bias is None else bias.double() for bias in biases)
    return F.silu(F.linear(x.double(), gate.double(), gate_bias)) * F.linear(x.double(), up.double(), up_bias)


def _extremes(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of every size, and the gate's result for them if up is 1."""
    sizes = torch.tensor([-3e38, -1e4, -127.0, -88.0, -86.9, -1e-30, 0.0, 1e-30, 88.0, 127.0, 1e4, 3e38])
    x = torch.zeros(1012, 32, dtype=dtype)
    x[:, 0] = torch.cat((sizes, torch.linspace(-80.0, 80.0, 1000)))
    gate, up = torch.eye(32, dtype=dtype), torch.zeros(32, 32, dtype=dtype)
    return x[:, 0], NativeGate(gate, up, torch.zeros(32, dtype=dtype), torch.ones(32, dtype=dtype))(x)[:, 0]


@needs_kernels
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    weight = _weight(*shape)
    for multiply in (NativeProduct(weight, None), NativeGate(weight, weight.flip(0), None, None)):
        _check_company(multiply, shape[1], torch.bfloat16)


@needs_kernels
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e-19])  # of rows and weights: their products are denormal in part
def test_split_pairs_have_the_bits_of_whole_ones(shape: tuple[int, int], scale: float) -> None:
    skip_unless_pairs_are_split()
    weight, bias = scale * _weight(*shape), (scale * torch.randn(shape[0])).bfloat16()
    for multiply in (NativeProduct(weight, bias), NativeGate(weight, weight.flip(0), bias, None)):
        for num_rows in ROWS:
            x = (scale * torch.randn(num_rows, shape[1])).bfloat16()
            with pairs_split(False):
                whole = multiply(x)
            with pairs_split(True):
                assert torch.equal(multiply(x).view(torch.int16), whole.view(torch.int16)), num_rows


@needs_kernels
@pytest.mark.usefixtures("any_instructions")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_read_as_one_stream_or_several_gives_the_same_bits(shape: tuple[int, int]) -> None:
    multiply = NativeProduct(_weight(*shape), None)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).bfloat16()
        with weights_in_one_stream(True):
            one = multiply(x)
        with weights_in_one_stream(False):
            assert torch.equal(multiply(x), one), num_rows


@needs_float_kernels
@pytest.mark.usefixtures("any_instructions")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_float32_row_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    weight = _weight(*shape).float()
    for multiply in (NativeProduct(weight, None), NativeGate(weight, weight.flip(0), None, None)):
        _check_company(multiply, shape[1], torch.float32)


@needs_float_kernels
def test_float32_rows_have_the_same_bits_on_any_instructions() -> None:
    library, best = native_library(Instructions.AVX2), native_instructions()
    assert library is not None
    weight, rows = _weight(320, 544).float(), torch.randn(14, 544)
    for multiply in (NativeProduct(weight, None), NativeGate(weight, weight.flip(0), None, None)):
        library.outrider_start(Instructions.AVX2)
        narrow = multiply(rows)
        library.outrider_start(best)
        assert torch.equal(multiply(rows), narrow)


def _check_company(multiply: NativeProduct, num_inputs: int, dtype: torch.dtype) -> None:
    rows = torch.randn(300, num_inputs, generator=_generator()).to(dtype)
    together = multiply(rows)
    for num_rows in ROWS[1:]:
        assert torch.equal(multiply(rows[:num_rows]), together[:num_rows])
        assert torch.equal(multiply(rows[-num_rows:]), together[-num_rows:])
    assert batch_invariant(multiply, num_inputs, dtype) is multiply


@needs_kernels
@pytest.mark.usefixtures("instructions")
def test_threads_do_not_change_a_bit() -> None:
    weight, x = _weight(1024, 1088), torch.randn(300, 1088).bfloat16()
    multiply = NativeProduct(weight, None)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = multiply(x)
        torch.set_num_threads(3)
        assert torch.equal(multiply(x), alone)
    finally:
        torch.set_num_threads(num_threads)


@needs_kernels
def test_callers_at_once_and_children_of_a_fork_get_the_same_bits() -> None:
    multiply, x = NativeProduct(_weight(1024, 1088), None), torch.randn(4, 1088).bfloat16()
    alone = multiply(x)

    def is_same(_: int) -> bool:
        torch.set_num_threads(3)
        return all(torch.equal(multiply(x), alone) for _ in range(300))

    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(is_same, range(3)))
    num_threads = torch.get_num_threads()
    try:
        assert is_same(0)
        assert _is_true_in_a_child(lambda: is_same(0))
    finally:
        torch.set_num_threads(num_threads)


@needs_kernels
def test_a_helper_that_waits_for_its_callers_core_is_moved_to_another() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    multiply, x = NativeProduct(_weight(1024, 1088), None), torch.randn(4, 1088).bfloat16()

    def is_moved() -> bool:
        torch.set_num_threads(2)
        multiply(x)  # starts the helper
        (helper,) = {int(each) for each in os.listdir("/proc/self/task")} - {os.getpid()}
        for thread in (helper, 0):
            os.sched_setaffinity(thread, {min(cores)})
        os.sched_setaffinity(0, cores)
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s and os.sched_getaffinity(helper) != cores:
            multiply(x)
        return os.sched_getaffinity(helper) == cores

    assert _is_true_in_a_child(is_moved)


def _is_true_in_a_child(function: Callable[[], bool]) -> bool:
    if not (child := os.fork()):
        signal.alarm(60)  # ends a child that waits for threads which it does not have
        is_true = False
        try:
            is_true = function()
        finally:  # pytest runs on in the parent only
            os._exit(0 if is_true else 1)
    return os.waitpid(child, 0)[1] == 0


@needs_kernels
@pytest.mark.usefixtures("instructions")
def test_leading_dimensions_and_strides_are_those_of_the_input() -> None:
    weight, wide = _weight(64, 32), torch.randn(3, 5, 96).bfloat16()
    product = NativeProduct(weight, None)(wide[..., 32:64])
    assert product.shape == (3, 5, 64)
    torch.testing.assert_close(product, F.linear(wide[..., 32:64], weight), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    "weight",
    [
        torch.full((64, 64), 0.1),
        torch.zeros(64, 64).half(),
        torch.zeros(64, 48).bfloat16(),
        torch.zeros(48, 64).bfloat16(),
    ],
    ids=["float32 of another dtype", "float16", "48 inputs", "48 outputs"],
)
def test_weights_that_the_kernels_do_not_take_are_left_to_torch(weight: torch.Tensor) -> None:
    assert not NativeProduct.fits(weight)
    x = torch.ones(3, weight.shape[1], dtype=weight.dtype)
    assert torch.equal(linear_of(weight, None)(x), F.linear(x, weight))


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ("0", "None"),
        pytest.param("avx512", "AVX512", marks=needs_kernels),
        pytest.param("avx2", "AVX2", marks=needs_float_kernels),
        ("amx", "OUTRIDER_NATIVE is 'amx'; set it"),
    ],
)
def test_the_kernels_can_be_switched_off_and_held_to_avx512(switch: str, expected: str) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        assert expected in pool.submit(instructions_used, switch).result()


@needs_kernels
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_another_width_or_dtype_than_the_weight_are_refused(dtype: torch.dtype) -> None:
    multiply = NativeProduct(_weight(32, 64).to(dtype), None)
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    with pytest.raises(TypeError, match="64"):
        multiply(torch.zeros(3, 64, dtype=other))
    with pytest.raises(TypeError, match="32"):
        multiply(torch.zeros(3, 32, dtype=dtype))

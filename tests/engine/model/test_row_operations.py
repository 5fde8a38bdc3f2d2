"""Our kernels between the products compute what torch does, and a row has the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.decoders.row_operations import NativeRows, TorchRows
from engine.model.linear.native_product import Gate
from tests.engine.fixtures.native_kernels import needs_float_kernels

pytestmark = [needs_float_kernels, pytest.mark.usefixtures("any_instructions")]

EPSILON = 1e-5
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-6}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=4 * tolerance)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (5, 576), (300, 2048)])
def test_a_sum_and_its_norm_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    hidden, delta, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    expected_total, expected = TorchRows(EPSILON).add_norm(hidden, delta.clone(), weight)
    kept = hidden.clone()
    total, normed = NativeRows(EPSILON).add_norm(hidden, delta, weight)
    assert torch.equal(total, expected_total)
    assert torch.equal(hidden, kept)
    assert_near(normed, expected)
    assert_near(
        NativeRows(EPSILON).add_norm(hidden, None, weight)[1], TorchRows(EPSILON).add_norm(hidden, None, weight)[1]
    )


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_stream_of_float32_takes_rows_of_bfloat16(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    hidden, delta = torch.randn(40, 576), torch.randn(40, 576).to(dtype)
    weight, kinds = torch.randn(576).to(weight_dtype), (NativeRows, TorchRows)
    ours, theirs = (kind(EPSILON, 0.5, dtype=dtype) for kind in kinds)
    for added in (delta, None):
        (total, normed), (expected_total, expected) = (
            rows.add_norm(hidden.clone(), added, weight) for rows in (ours, theirs)
        )
        assert total.dtype is torch.float32
        assert normed.dtype is dtype
        torch.testing.assert_close(total, hidden + (0 if added is None else 0.5 * delta.float()))
        torch.testing.assert_close(total, expected_total)
        assert_near(normed, expected)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
)
def test_a_layer_norm_with_biases_is_that_of_torch(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    hidden, weight = 3.0 + torch.randn(40, 576).to(dtype), torch.randn(2, 576).to(weight_dtype)
    ours, theirs = (kind(EPSILON, centers=True).add_norm(hidden, None, weight)[1] for kind in (NativeRows, TorchRows))
    assert_near(ours, theirs)
    factors, biases = weight.float()
    whole = torch.nn.functional.layer_norm(hidden.float(), (576,), factors, biases, eps=EPSILON)
    torch.testing.assert_close(ours.float(), whole, rtol=TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("function", [each for each in Gate if each not in (Gate.NONE, Gate.CLAMPED)])
@pytest.mark.parametrize("shape", [(1, 3), (5, 96), (90, 1030)])
def test_functions_of_mlps_without_gates_are_those_of_torch(
    dtype: torch.dtype, function: Gate, shape: tuple[int, int]
) -> None:
    rows = (4.0 * torch.randn(shape)).to(dtype)
    rows[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    expected = TorchRows(EPSILON).activate(rows.clone(), function)
    assert_near(NativeRows(EPSILON).activate(rows, function), expected)
    assert NativeRows(EPSILON).activate(torch.full((1, 9), torch.nan, dtype=dtype), function).isnan().all()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (90, 1024)])
def test_rows_times_a_function_of_their_gates_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gates, rows = (4.0 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    gates[0, :3] = torch.tensor([-200.0, 200.0, torch.nan])
    for function in (Gate.LOGISTIC, Gate.GELU_TANH):
        expected = TorchRows(EPSILON).gate(gates.float(), function, rows.float())
        found = NativeRows(EPSILON).gate(gates.clone(), function, rows.clone())
        torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("factors", [(0.8, 0.8), (1.7, -0.3)])
def test_xielu_is_exact_near_zero_and_far_from_it(factors: tuple[float, float]) -> None:
    rows = torch.cat([torch.tensor([0.0, -30.0, 30.0, -1e-6, torch.nan]), -torch.logspace(-7, 1, 400)])[None]
    expected = TorchRows(EPSILON).activate(rows.double(), Gate.XIELU, factors).float()
    found = NativeRows(EPSILON).activate(rows.clone(), Gate.XIELU, factors)
    size = torch.maximum(expected.abs(), rows.abs())
    assert bool(((found - expected).abs() <= 1e-6 * size + 1e-12)[~rows.isnan()].all())
    assert torch.equal(found.isnan(), rows.isnan())


@DTYPES
@pytest.mark.parametrize(("num_rows", "dim"), [(1, 32), (7, 64), (200, 128)])
def test_rotated_heads_are_those_of_torch_and_the_others_stay(dtype: torch.dtype, num_rows: int, dim: int) -> None:
    heads, table = torch.randn(num_rows, 6, dim).to(dtype), torch.randn(num_rows, 2, dim).to(dtype)
    expected, others = TorchRows(EPSILON).rotate(heads, 4, table), heads[:, 4:].clone()
    assert_near(NativeRows(EPSILON).rotate(heads, 4, table), expected)
    assert torch.equal(heads[:, 4:], others)


@DTYPES
@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("num_dims", [16, 20, 48, 80])
def test_rotated_parts_that_fill_no_registers_are_those_of_torch(
    dtype: torch.dtype, num_dims: int, in_pairs: bool
) -> None:
    heads, table = torch.randn(7, 6, 80).to(dtype), torch.randn(7, 2, num_dims).to(dtype)
    expected, others = TorchRows(EPSILON).rotate(heads, 4, table, in_pairs=in_pairs), heads[:, 4:].clone()
    assert_near(NativeRows(EPSILON).rotate(heads, 4, table, in_pairs=in_pairs), expected)
    assert torch.equal(heads[:, 4:], others)


@DTYPES
def test_normed_heads_are_those_of_torch_and_the_others_stay(dtype: torch.dtype) -> None:
    heads, weight = torch.randn(40, 6, 32).to(dtype), torch.randn(4, 32).to(dtype)
    expected, others = TorchRows(EPSILON).norm_heads(heads, 4, weight), heads[:, 4:].clone()
    found = NativeRows(EPSILON).norm_heads(heads, 4, weight)
    assert_near(found[:, :4], expected)
    assert torch.equal(found[:, 4:], others)


@DTYPES
def test_heads_normed_around_their_means_are_those_of_torch(dtype: torch.dtype) -> None:
    heads, weight = 2.0 + torch.randn(40, 6, 32).to(dtype), torch.randn(2, 4, 32).to(dtype)
    for own in (weight, weight[0]):
        expected = TorchRows(EPSILON, centers=True).norm_heads(heads, 4, own)
        found = NativeRows(EPSILON, centers=True).norm_heads(heads.clone(), 4, own)
        torch.testing.assert_close(found[:, :4], expected, rtol=2 * TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])
        assert torch.equal(found[:, 4:], heads[:, 4:])


@DTYPES
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    rows, hidden, weight = NativeRows(EPSILON), torch.randn(600, 512).to(dtype), torch.randn(512).to(dtype)
    together = rows.add_norm(hidden, None, weight)[1]
    for index in (0, 17, 599):
        assert torch.equal(rows.add_norm(hidden[index : index + 1], None, weight)[1][0], together[index])


def test_sizes_that_do_not_fill_registers_are_left_to_torch() -> None:
    weights = torch.zeros(1)
    assert NativeRows.fit(576, (64, 64), weights)
    assert NativeRows.fit(2560, (80, 32), weights)  # Phi-2
    assert not NativeRows.fit(570, (64, 64), weights)
    assert not NativeRows.fit(576, (72, 64), weights)
    assert not NativeRows.fit(576, (80, 15), weights)
    assert not NativeRows.fit(576, (64, 64), weights.half())

"""int4 is fitted to a weight, in 4.5 bits, with less error than rounding between extremes makes in 5."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.linear import rounding
from engine.model.linear.rounding import scale_bytes, scale_of, to_int4, to_int4_with_bases, to_int6
from tests.engine.fixtures.native_kernels import needs_float_kernels

pytestmark = needs_float_kernels


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _heavy(*shape: int) -> Tensor:
    return _normal(*shape) / _normal(2, *shape)[1].abs().clamp(min=0.2)


def _squares(weight: Tensor, round_: Callable[[Tensor], QuantizedWeight]) -> float:
    return float((round_(weight).dequantized() - weight).square().sum())


@pytest.mark.parametrize("weight", [_normal(64, 256), _heavy(64, 256)], ids=["normal", "heavy"])
def test_fitted_levels_are_nearer_than_levels_between_the_extremes(weight: Tensor) -> None:
    assert _squares(weight, to_int4) < 0.97 * _squares(weight, to_int4_with_bases)


@pytest.mark.parametrize("weight", [_normal(64, 256), _heavy(64, 256)], ids=["normal", "heavy"])
def test_six_bits_are_nearer_than_with_the_extreme_at_an_end(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _squares(weight, to_int6)
    monkeypatch.setattr(rounding, "_ENDS", (-32,))
    assert found < 0.99 * _squares(weight, to_int6)


@pytest.mark.parametrize("shift", [-1.0, 0.0, 1.0])
def test_no_scale_and_zero_are_much_better(shift: float) -> None:
    """Against all zeros of each of the scales."""
    groups = _normal(20, 32) + shift
    least = torch.full((20,), torch.inf)
    zeros = torch.arange(256) / 16
    widest = scale_bytes((groups.amax(1).clamp(min=0) - groups.amin(1).clamp(max=0)) / 15)
    for smaller in range(8):
        scales = scale_of(widest - smaller)[:, None, None]
        exact = groups[:, :, None] / scales + zeros
        off = (exact.round().clamp(0, 15) - exact) * scales
        least = torch.minimum(least, off.square().sum(1).amin(1))
    found = (to_int4(groups).dequantized() - groups).square().sum(1)
    assert float(found.sum()) < 1.05 * float(least.sum())


def test_both_searches_find_the_same() -> None:
    groups = _normal(1000, 32) * torch.logspace(-4, 2, 1000)[:, None]
    groups[3], groups[5, 7:], groups[6] = 0.0, 0.0, groups[6].abs()
    found, expected = rounding._fitted(groups), rounding._fitted_by_torch(groups)
    for one, other in zip(found, expected, strict=True):
        assert float((one == other).float().mean()) > 0.99


def test_weights_are_rounded_where_no_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU and no compiler."""
    weight = _normal(64, 96)
    expected = to_int4(weight).dequantized()

    def refuse(*_: object) -> None:
        raise AssertionError("this machine has no kernels")

    monkeypatch.setattr(rounding, "native_library", lambda _: None)
    monkeypatch.setattr(rounding, "kernel", refuse)
    assert float((to_int4(weight).dequantized() == expected).float().mean()) > 0.99


def test_the_fit_does_not_depend_on_threads_or_the_number_of_groups() -> None:
    weight, num_threads = _normal(96, 1056), torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(to_int4(weight).dequantized())
    torch.set_num_threads(num_threads)
    assert torch.equal(*found)
    assert torch.equal(torch.cat([to_int4(part).dequantized() for part in weight.split(5)]), found[0])


def test_a_scale_has_the_byte_that_it_came_from() -> None:
    every = torch.arange(256)
    assert torch.equal(scale_bytes(scale_of(every)), every.to(torch.uint8))
    between = scale_of(every[:-1]) * 1.01
    assert torch.equal(scale_bytes(between), every[1:].to(torch.uint8))


def test_zeros_and_huge_numbers_have_levels() -> None:
    weight = torch.zeros(3, 32)
    weight[1, 4], weight[2, 5] = 20_000.0, -1e-8
    rounded = to_int4(weight).dequantized()
    assert torch.equal(rounded[0], torch.zeros(32))
    torch.testing.assert_close(rounded[1], weight[1], rtol=0.04, atol=0)
    torch.testing.assert_close(rounded[2], weight[2], rtol=0, atol=1e-6)

"""Norms by our kernel on GPUs are torch's, and a row has the same bits in any company; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from engine.model.decoders.row_operations import TorchRows
from tests.engine.fixtures.attention_fixtures import DEVICE

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.model.decoders.triton_rows import TritonRows

EPSILON = 1e-5
ROUNDING = {"rtol": 0.02, "atol": 1e-6}  # the interpreter cuts numbers to bfloat16 instead of rounding them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [96, 128, 1000])
def test_sums_and_norms_are_torchs_in_any_company(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    hidden, delta = (torch.randn(20, size, generator=generator).to(DEVICE, dtype) for _ in range(2))
    weight = torch.rand(size, generator=generator).to(DEVICE, dtype)
    ours, theirs = TritonRows(EPSILON), TorchRows(EPSILON)
    for added in (None, delta):
        total, normed = ours.add_norm(hidden, None if added is None else added.clone(), weight)
        expected_total, expected = theirs.add_norm(hidden, added, weight)
        torch.testing.assert_close(total, expected_total, **ROUNDING)
        torch.testing.assert_close(normed, expected, **ROUNDING)
        for start, end in ((0, 1), (3, 7), (5, 20)):
            part = None if added is None else added[start:end].clone()
            assert torch.equal(ours.add_norm(hidden[start:end], part, weight)[1], normed[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed_each_by_its_own_weight(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(9, 8, 24, generator=generator).to(DEVICE, dtype)
    weight = torch.rand(6, 24, generator=generator).to(DEVICE, dtype)
    normed = TritonRows(EPSILON).norm_heads(heads, 6, weight)
    torch.testing.assert_close(normed, TorchRows(EPSILON).norm_heads(heads, 6, weight), **ROUNDING)
    assert torch.equal(TritonRows(EPSILON).norm_heads(heads[4:5], 6, weight), normed[4:5])

"""Our product on GPUs is `F.linear`, and a row has the same bits in any company; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.engine.fixtures.attention_fixtures import DEVICE

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.model.linear.triton_product import TritonProduct

pytestmark = pytest.mark.usefixtures("dots_without_places")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 128), (50, 200), (130, 96), (7, 33)])
def test_a_row_has_the_same_bits_in_any_company(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_outputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(DEVICE, dtype) / num_inputs**0.5
    bias = torch.randn(num_outputs, generator=generator).to(DEVICE, dtype) if num_outputs % 2 == 0 else None
    rows = torch.randn(70, num_inputs, generator=generator).to(DEVICE, dtype)
    product = TritonProduct(weight, bias)
    expected = product(rows)
    torch.testing.assert_close(expected, F.linear(rows, weight, bias), rtol=0.02, atol=0.02)
    for start, end in ((0, 1), (3, 8), (8, 25), (20, 69), (69, 70)):
        assert torch.equal(product(rows[start:end]), expected[start:end])
    assert torch.equal(product(rows.flip(0)), expected.flip(0))
    assert torch.equal(product(rows.view(7, 10, -1)), expected.view(7, 10, -1))

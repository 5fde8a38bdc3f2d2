"""Products by few bits on a GPU are those by the weights' definition in float32; interpreted without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.config import Quantization
from engine.model.checkpoint.unread_weight import QuantizedWeight, joined_quantized
from engine.model.linear.rounding import to_int4, to_int4_with_bases, to_int6, to_int8_groups
from tests.engine.fixtures.attention_fixtures import DEVICE

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.model.linear import triton_few_bits
from engine.model.linear.triton_few_bits import FewBitsProduct, Kind, UnpackedPart

pytestmark = pytest.mark.usefixtures("dots_without_places")

GENERATOR = torch.Generator().manual_seed(0)


def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR)


def scales(*shape: int) -> torch.Tensor:
    return (torch.rand(*shape, generator=GENERATOR) * 0.1 + 0.01).half()


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()  # every number there is
CASES: dict[str, tuple[Kind, Callable[[], QuantizedWeight]]] = {
    "float8, a scale in all": (
        Kind.FLOAT8,
        lambda: QuantizedWeight(FLOAT8.repeat(40, 1).to(torch.float8_e4m3fn), scales(1, 1).float(), row_step=40),
    ),
    "float8, outputs": (Kind.FLOAT8, lambda: QuantizedWeight(weight(50, 96).to(torch.float8_e4m3fn), scales(50, 1))),
    "float8, blocks": (
        Kind.FLOAT8,
        lambda: QuantizedWeight(weight(200, 256).to(torch.float8_e4m3fn), scales(2, 2).float(), row_step=128),
    ),
    "GPTQ": (Kind.INT4, lambda: QuantizedWeight(numbers(0, 16, 40, 256).short(), scales(40, 2), zeros=scales(40, 2))),
    "symmetric int4": (
        Kind.INT4,
        lambda: QuantizedWeight(numbers(0, 16, 33, 128).short(), scales(33, 4), zeros=torch.full((33, 4), 8.0)),
    ),
    "8 bits from 0": (
        Kind.INT8,
        lambda: QuantizedWeight(numbers(0, 256, 20, 64).short(), scales(20, 1), zeros=numbers(0, 256, 20, 1).float()),
    ),
    "int8": (Kind.INT8, lambda: QuantizedWeight(numbers(-128, 128, 20, 64).to(torch.int8), scales(20, 1).bfloat16())),
    "our int4": (Kind.INT4, lambda: to_int4(weight(40, 128))),
    "our int4 with bases": (Kind.INT4, lambda: to_int4_with_bases(weight(40, 128))),
    "our int6": (Kind.INT8, lambda: to_int6(weight(40, 128))),
    "our int8": (Kind.INT8, lambda: to_int8_groups(weight(40, 128), 64)),
}


def made(case: str) -> QuantizedWeight:
    made = CASES[case][1]()
    return made if case != "GPTQ" else QuantizedWeight(made.numbers, made.scales, zeros=numbers(0, 17, 40, 2).float())


@pytest.mark.parametrize("case", CASES)
def test_a_product_is_that_of_the_weights_definition(case: str) -> None:
    stored = made(case).to(DEVICE)
    product = FewBitsProduct(stored, None, torch.float32, UnpackedPart())
    assert product._kind is CASES[case][0]
    rows = torch.randn(5, stored.numbers.shape[1], generator=GENERATOR).to(DEVICE)
    expected = rows.double() @ stored.dequantized().double().T
    torch.testing.assert_close(product(rows).double(), expected, rtol=1e-5, atol=1e-4 * float(expected.abs().mean()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["float8, a scale in all", "GPTQ", "our int4", "8 bits from 0"])
def test_rows_of_two_bytes_lose_nothing_but_the_results_rounding(case: str, dtype: torch.dtype) -> None:
    stored = made(case).to(DEVICE)
    bias = torch.randn(len(stored.numbers), generator=GENERATOR).to(DEVICE, dtype)
    rows = torch.randn(2, stored.numbers.shape[1], generator=GENERATOR).to(DEVICE, dtype)
    found = FewBitsProduct(stored, bias, dtype, None)(rows)
    expected = (rows.double() @ stored.dequantized().double().T + bias.double()).to(dtype)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-3 * float(expected.abs().mean()))


@pytest.mark.parametrize("most_numbers", [1 << 26, 1 << 11])
@pytest.mark.parametrize("case", CASES)
def test_many_rows_are_multiplied_by_the_unpacked_weight(
    case: str, most_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_few_bits, "_PART", most_numbers)
    stored = made(case).to(DEVICE)
    num_outputs, num_inputs = stored.numbers.shape
    bias = torch.randn(num_outputs, generator=GENERATOR).to(DEVICE)
    product = FewBitsProduct(stored, bias, torch.float32, UnpackedPart())
    rows = torch.randn(2, 20, num_inputs, generator=GENERATOR).to(DEVICE)
    expected = rows.double() @ stored.dequantized().double().T + bias.double()
    found = product(rows)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4 * float(expected.abs().mean()))
    size = product._num_unpacked
    parts = [product._part(first, min(size, num_outputs - first)).clone() for first in range(0, num_outputs, size)]
    torch.testing.assert_close(torch.cat(parts), stored.dequantized().float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", ["float8, blocks", "GPTQ", "our int4"])
def test_a_row_has_the_same_bits_in_any_company(case: str) -> None:
    stored = made(case).to(DEVICE)
    product = FewBitsProduct(stored, None, torch.bfloat16, None)
    rows = torch.randn(70, stored.numbers.shape[1], generator=GENERATOR).to(DEVICE, torch.bfloat16)
    expected = product(rows)
    for start, end in ((0, 1), (3, 8), (20, 69)):
        assert torch.equal(product(rows[start:end]), expected[start:end])
    assert torch.equal(product(rows.flip(0)), expected.flip(0))


def test_weights_stored_alike_are_joined() -> None:
    parts = [made("float8, blocks"), made("float8, blocks")]  # 200 outputs end within a block
    joined = joined_quantized(parts)
    assert joined is not None
    assert torch.equal(joined.dequantized(), torch.cat([part.dequantized() for part in parts]))
    symmetric = QuantizedWeight(numbers(0, 16, 8, 256).short(), scales(8, 2))
    joined = joined_quantized([made("GPTQ"), symmetric])
    assert joined is not None
    assert torch.equal(joined.dequantized()[40:], symmetric.dequantized())
    assert joined_quantized([made("our int8"), made("our int4")]) is None


def test_four_bits_take_half_a_byte() -> None:
    product = FewBitsProduct(made("GPTQ"), None, torch.bfloat16, UnpackedPart())
    assert product._weight.nbytes == 40 * 256 // 2
    assert Quantization.INT4 == "int4"

"""Quantised products are near the full ones, a row's result hangs on nothing but the row, and engines serve them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig, Quantization
from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.linear import quantized_linear
from engine.model.linear.native_product import Kind
from engine.model.linear.native_quantized import kind_of
from engine.model.linear.quantized_linear import can_quantize, linear_factory, quantizer
from engine.model.linear.rounding import to_int4_with_bases, to_int8_groups
from engine.model.loader import model_version
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.drafted_texts import check_drafts_change_no_token

pytestmark = pytest.mark.skipif(
    not can_quantize(torch.device("cpu")), reason="no kernels for int8 and int4 weights here"
)

MAX_ERROR = {Quantization.INT8: 0.01, Quantization.INT4: 0.09}
QUANTIZED = list(MAX_ERROR)


def to_int8(weight: Tensor) -> QuantizedWeight:
    round_ = quantizer(weight, Quantization.INT8)
    assert round_ is not None
    return round_(weight)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_the_product_is_near_the_full_one(
    quantization: Quantization, dtype: torch.dtype, has_bias: bool, num_rows: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 192).to(dtype)
    bias = torch.randn(128).to(dtype) if has_bias else None
    x = torch.randn(1, num_rows, 192).to(dtype)
    product = linear_factory(quantization)(weight, bias)(x)
    assert product.dtype == dtype
    assert product.shape == (1, num_rows, 128)
    assert relative_error(product, F.linear(x, weight, bias)) < MAX_ERROR[quantization]


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_no_rows_give_no_rows(quantization: Quantization) -> None:
    assert linear_factory(quantization)(torch.randn(64, 64), None)(torch.randn(0, 64)).shape == (0, 64)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_row_does_not_depend_on_the_rows_beside_it(quantization: Quantization) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 192).bfloat16() * torch.logspace(-3, 3, 40)[:, None].bfloat16()
    multiply = linear_factory(quantization)(torch.randn(128, 192).bfloat16(), None)
    assert torch.equal(multiply(x), torch.cat([multiply(row[None]) for row in x]))


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_rows_and_weights_of_zeros_give_zeros(quantization: Quantization) -> None:
    make_linear, zeros = linear_factory(quantization), torch.zeros(3, 64)
    assert torch.equal(make_linear(torch.zeros(64, 64), None)(torch.randn(3, 64)), zeros)
    assert torch.equal(make_linear(torch.randn(64, 64), None)(zeros), zeros)


@pytest.mark.parametrize(
    ("round_weight", "num_inputs", "group_size", "num_steps"),
    [(to_int8, 128, 64, 254), (to_int8, 96, 32, 254), (to_int4_with_bases, 128, 32, 15)],
)
def test_a_weight_is_off_by_half_a_step_of_its_group_at_most(
    round_weight: Callable[[Tensor], QuantizedWeight], num_inputs: int, group_size: int, num_steps: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, num_inputs) * torch.logspace(-2, 2, 64)[:, None]
    groups = weight.unflatten(1, (-1, group_size))
    lowest, highest = groups.aminmax(dim=-1)
    width = highest - lowest if round_weight is to_int4_with_bases else 2 * groups.abs().amax(dim=-1)
    rounding = 2**-10 * groups.abs().amax(dim=-1)  # scale and base are float16
    error = (round_weight(weight).dequantized() - weight).abs().unflatten(1, (-1, group_size))
    assert (error <= (0.5 * width / num_steps + 2 * rounding)[..., None]).all()


def test_groups_of_a_published_int8_format_are_kept() -> None:
    """llama.cpp's Q8_0 has a scale for 32 inputs; ours would have one for 64."""
    torch.manual_seed(0)
    numbers = torch.randint(-127, 128, (64, 4, 32))
    numbers[..., 0] = 127
    weight = (numbers * torch.rand(64, 4, 1).half().float()).flatten(1)
    assert torch.equal(to_int8(weight).dequantized(), weight)


def test_groups_of_a_published_int4_format_are_kept_to_float16() -> None:
    torch.manual_seed(0)
    levels = torch.randint(0, 16, (64, 4, 32))
    levels[..., 0], levels[..., 1] = 0, 15
    scales, bases = torch.rand(2, 64, 4).half().float()
    weight = (levels * scales[..., None] - bases[..., None]).flatten(1)
    round_ = quantizer(weight, Quantization.INT4)
    assert round_ is not None
    torch.testing.assert_close(round_(weight).dequantized(), weight, rtol=0, atol=2e-3)


def multiples(least: int, most: int) -> Tensor:
    """A weight [64, 256] of whole multiples of a float16 number for each 128 inputs."""
    torch.manual_seed(0)
    numbers = torch.randint(least, most + 1, (64, 2, 128)).float()
    numbers[3, 0, :40] = 0
    return (numbers * (torch.rand(64, 2, 1) * torch.tensor([1.0, -1.0]).view(1, 2, 1)).half().float()).flatten(1)


@pytest.mark.parametrize(
    ("least", "most", "quantization"),
    [
        (-8, 7, Quantization.INT4),  # Q4_0, and GPTQ with symmetric levels
        (-8, 7, Quantization.INT8),
        (-3, 12, Quantization.INT8),  # GPTQ and AWQ with zero points
        (-12, 12, Quantization.INT8),  # MXFP4, in halves
        (-1, 1, Quantization.INT4),  # BitNet
        (-1, 1, Quantization.INT8),
    ],
)
def test_numbers_of_four_bits_are_kept(least: int, most: int, quantization: Quantization) -> None:
    weight = multiples(least, most)
    round_ = quantizer(weight, quantization)
    assert round_ is not None
    assert torch.equal(round_(weight).dequantized(), weight)
    rows = torch.randn(5, 256)
    product = linear_factory(quantization)(weight, None)(rows)
    assert relative_error(product, F.linear(rows, weight)) < 0.01


def test_three_levels_of_any_scale_are_kept_to_float16() -> None:
    """BitNet's scales of bfloat16 divide, and so are no numbers of float16."""
    weight = multiples(-1, 1) / 3
    round_ = quantizer(weight, Quantization.INT4)
    assert round_ is not None
    torch.testing.assert_close(round_(weight).dequantized(), weight, rtol=2**-11, atol=0)


def test_levels_with_a_zero_point_are_kept_to_the_precision_of_a_base() -> None:
    weight = multiples(-3, 12)
    round_ = quantizer(weight, Quantization.INT4)
    assert round_ is not None
    torch.testing.assert_close(round_(weight).dequantized(), weight, rtol=0, atol=2**-8)


def test_the_head_of_an_int4_model_has_6_bits() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 96).bfloat16()
    round_ = quantizer(weight, Quantization.INT4, is_head=True)
    assert round_ is not None
    assert kind_of(round_(weight)) is Kind.INT6
    assert relative_error(round_(weight).dequantized(), weight) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_a_published_int8_format_keeps_its_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = to_int8_groups(torch.randn(64, 96), 32).dequantized()
    round_ = quantizer(weight.to(dtype), Quantization.INT4, is_head=True)
    assert round_ is not None
    assert kind_of(round_(weight)) is Kind.INT8
    assert relative_error(round_(weight.to(dtype)).dequantized(), weight) < (0.003 if dtype is torch.bfloat16 else 1e-6)


def test_the_head_of_an_int8_model_has_groups_of_32() -> None:
    weight = torch.randn(64, 128)
    round_ = quantizer(weight, Quantization.INT8, is_head=True)
    assert round_ is not None
    assert round_(weight).scales.shape == (64, 4)
    assert to_int8(weight).scales.shape == (64, 2)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_shape_that_the_kernel_does_not_take_is_kept_as_it_is(quantization: Quantization) -> None:
    weight, x = torch.randn(10, 33), torch.randn(2, 33)
    assert torch.equal(linear_factory(quantization)(weight, None)(x), F.linear(x, weight))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "target"
    write_checkpoint(path, seed=0)
    return path


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_quantised_model_is_near_the_full_one_and_not_equal(folder: Path, quantization: Quantization) -> None:
    logits = []
    for each in (Quantization.NONE, quantization):
        runner = ModelRunner(ModelConfig(str(folder), "float32", quantization=each), CacheConfig(num_blocks=4))
        logits.append(runner.forward([Span(list(range(1, 13)), 0, [0], 12)]))
    assert 0 < relative_error(logits[1], logits[0]) < 0.5


def test_each_quantisation_has_a_version_of_its_own(folder: Path) -> None:
    assert len({model_version(str(folder), each) for each in Quantization}) == len(Quantization)
    assert model_version(str(folder)) == model_version(str(folder), "none")


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_speculation_changes_no_token_of_a_quantised_target(folder: Path, quantization: Quantization) -> None:
    model = ModelConfig(str(folder), "float32", quantization=quantization)
    check_drafts_change_no_token(model, CacheConfig(num_blocks=64))


def test_a_machine_without_the_units_refuses_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "can_quantize", lambda device: False)
    with pytest.raises(ConfigError, match=r"quantization is 'int8'.*AVX2"):
        ModelRunner(ModelConfig(str(folder), "float32", quantization="int8"), CacheConfig(num_blocks=4))

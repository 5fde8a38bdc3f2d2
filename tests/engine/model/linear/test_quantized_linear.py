"""Quantised products are near the full ones, a row's result hangs on nothing but the row, and engines serve them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config import CacheConfig, ModelConfig, Quantization
from engine.model.linear.quantized_linear import can_quantize, int4_linear, int8_linear, linear_factory
from engine.model.loader import model_version
from engine.model.runner import model_runner
from engine.model.runner.model_runner import ModelRunner
from engine.span import Span
from protos.errors import ConfigError
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.drafted_texts import check_drafts_change_no_token

pytestmark = pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="the processor has no int8 units")

MAX_ERROR = {Quantization.INT8: 0.02, Quantization.INT4: 0.16}
QUANTIZED = list(MAX_ERROR)


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


def test_an_int8_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 192).bfloat16() * torch.logspace(-3, 3, 40)[:, None].bfloat16()
    multiply = int8_linear(torch.randn(128, 192).bfloat16(), None)
    assert torch.equal(multiply(x), torch.cat([multiply(row[None]) for row in x]))


def test_rows_and_weights_of_zeros_give_zeros() -> None:
    assert torch.equal(int8_linear(torch.zeros(64, 64), None)(torch.randn(3, 64)), torch.zeros(3, 64))
    assert torch.equal(int8_linear(torch.randn(64, 64), None)(torch.zeros(3, 64)), torch.zeros(3, 64))
    assert torch.equal(int4_linear(torch.zeros(64, 64), None)(torch.randn(3, 64)), torch.zeros(3, 64))


def test_an_int4_weight_is_off_by_half_a_step_of_its_group_at_most() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128) * torch.logspace(-2, 2, 64)[:, None]
    restored = int4_linear(weight, None)(torch.eye(128)).t()
    step = (weight.amax(dim=1) - weight.amin(dim=1)) / 15
    rounding = 2**-7 * weight.abs().amax(dim=1)  # scale and middle are bfloat16, and so is the product
    assert ((restored - weight).abs() <= (0.5 * step + 2 * rounding)[:, None]).all()


def test_a_shape_that_the_int4_operator_lacks_is_kept_as_int8() -> None:
    weight, x = torch.randn(10, 33), torch.randn(2, 33)
    assert torch.equal(int4_linear(weight, None)(x), int8_linear(weight, None)(x))


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
    monkeypatch.setattr(model_runner, "can_quantize", lambda device: False)
    with pytest.raises(ConfigError, match=r"quantization is 'int8'.*AVX512-VNNI"):
        ModelRunner(ModelConfig(str(folder), "float32", quantization="int8"), CacheConfig(num_blocks=4))

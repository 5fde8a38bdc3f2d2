"""LongCat-Flash's routers keep the weights that they read, and JetMoE's experts are packed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, ModelConfig, ModelDtype, Quantization
from engine.model.loader import load_model
from engine.model.runner.model_runner import ModelRunner
from tests.engine.fixtures.families import write_family
from tests.engine.model.test_more_families import small_config


@pytest.mark.parametrize("family", ["longcat_flash", "jetmoe"])
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT4])
def test_a_runner_starts_in_bfloat16_and_int4(tmp_path: Path, family: str, quantization: Quantization) -> None:
    """The start compares logits with the stock model's."""
    write_family(tmp_path, small_config(family))
    model = ModelConfig(str(tmp_path), ModelDtype.BFLOAT16, "cpu", quantization=quantization)
    runner = ModelRunner(model, CacheConfig(num_blocks=2))
    assert runner.num_blocks == 2


def test_experts_that_no_packing_knows_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_family(tmp_path, small_config("longcat_flash"))
    model = ModelConfig(str(tmp_path), ModelDtype.BFLOAT16, "cpu", quantization=Quantization.INT4)
    with caplog.at_level(logging.WARNING):
        ModelRunner(model, CacheConfig(num_blocks=2))
    assert "2 layers of experts are not quantized, the first is model.layers.0.mlp.experts: they are" in caplog.text


@torch.inference_mode()
def test_experts_that_the_loader_splits_compute_what_stock_ones_do(tmp_path: Path) -> None:
    stock = write_family(tmp_path, small_config("jetmoe"))
    split = load_model(ModelConfig(str(tmp_path), ModelDtype.FLOAT32, "cpu"))
    assert all(parameter.ndim < 3 for parameter in split.parameters())
    ids = torch.arange(3, 33)[None]
    expected = stock(ids, use_cache=False).logits
    torch.testing.assert_close(split(ids, use_cache=False).logits, expected, rtol=0, atol=1e-4)

"""Packed products equal the plain ones, and packing frees the plain weight."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.config import CacheConfig, ModelConfig
from engine.model.linear import gated_linear, packed_linear
from engine.model.linear.packed_linear import PackedLinear, can_pack, can_reorder, linear_of, pack_linears
from engine.model.loader import load_model
from engine.model.runner import served_weights
from engine.model.runner.model_runner import ModelRunner
from tests.engine.fixtures.families import SERVED, write_family

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def pack_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_MIN_FLOAT32_ELEMENTS", 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 8, 70])
def test_packed_product_is_the_plain_one(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    weight = torch.randn(48, 33).to(dtype)
    bias = torch.randn(48).to(dtype) if has_bias else None
    x = torch.randn(1, num_rows, 33).to(dtype)
    product = linear_of(weight, bias)(x)
    assert product.dtype == dtype
    torch.testing.assert_close(product, F.linear(x, weight, bias), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_strided_input_is_multiplied_as_it_reads() -> None:
    weight, wide = torch.randn(16, 8), torch.randn(5, 24)
    torch.testing.assert_close(linear_of(weight, None)(wide[:, 8:16]), F.linear(wide[:, 8:16], weight))


def test_without_the_private_operators_the_product_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, x = torch.randn(16, 8), torch.randn(3, 8)
    assert not can_pack(weight)
    assert torch.equal(linear_of(weight, None)(x), F.linear(x, weight))


def test_small_float32_weights_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_MIN_FLOAT32_ELEMENTS", 1000)
    assert not can_pack(torch.randn(16, 8))
    assert not can_pack(torch.randn(64, 64).to(torch.float16))


def test_every_plain_linear_layer_of_a_model_is_packed() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(8, 16), "conv": Conv1D(16, 8), "norm": nn.LayerNorm(8)})
    x = torch.randn(3, 8)
    expected = [model["linear"](x), model["conv"](x)]
    assert pack_linears(model) == 2
    assert isinstance(model["linear"], PackedLinear)
    torch.testing.assert_close([model["linear"](x), model["conv"](x)], expected)


def test_packing_frees_the_plain_weight() -> None:
    model = nn.Sequential(nn.Linear(8, 16))
    weight = weakref.ref(model[0].weight)
    pack_linears(model)
    assert weight() is None


@pytest.mark.skipif(not can_reorder(torch.zeros(1, dtype=torch.bfloat16)), reason="no bfloat16 on this processor")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_runner_holds_no_weight_beside_the_packed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, deterministic: bool
) -> None:
    monkeypatch.setattr(gated_linear, "_MIN_FUSED_ELEMENTS", 1)
    write_family(tmp_path, SERVED[family]())
    weights: dict[str, weakref.ref[torch.Tensor]] = {}

    def load_and_watch(config: ModelConfig, device: torch.device | None, **options: Any) -> PreTrainedModel:
        model = load_model(config, device, **options)
        weights.update({name: weakref.ref(weight) for name, weight in model.named_parameters() if weight.dim() == 2})
        return model

    monkeypatch.setattr(served_weights, "load_model", load_and_watch)
    model = ModelConfig(str(tmp_path), "bfloat16", "cpu", deterministic=deterministic)
    runner = ModelRunner(model, CacheConfig(num_blocks=2))
    gc.collect()
    kept = {name for name, weight in weights.items() if weight() is not None}
    assert runner.num_blocks == 2
    assert kept <= {name for name in weights if name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight"))}


def test_a_tied_embedding_keeps_its_weight() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
    model["head"].weight = model["embedding"].weight
    row = model["embedding"].weight[3].clone()
    pack_linears(model)
    assert torch.equal(model["embedding"](torch.tensor(3)), row)
    torch.testing.assert_close(model["head"](row), model["embedding"].weight @ row)


def test_subclasses_of_linear_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(8, 16))
    assert pack_linears(model) == 0

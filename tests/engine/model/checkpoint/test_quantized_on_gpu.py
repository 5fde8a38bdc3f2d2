"""Quantized checkpoints on a GPU: products read their few bits.

Without a GPU products are computed by their definition; `linear/test_triton_few_bits.py` holds the kernel to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig, Quantization
from engine.model import loader, paged_model
from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.linear import quantized_linear
from engine.model.linear.weight_store import NO_STORE
from engine.model.loader import load_model
from engine.model.runner import served_weights
from engine.model.runner.model_runner import ModelRunner
from tests.engine.fixtures.attention_fixtures import DEVICE
from tests.engine.fixtures.families import SERVED, write_family
from tests.engine.model.checkpoint.quantized_folders import BLOCK_FP8, BY_DEFINITION, llama, quantize_folder

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.model.linear import triton_few_bits
from engine.model.linear.triton_few_bits import FewBitsProduct
from engine.model.linear.triton_product import TileSize

pytestmark = pytest.mark.usefixtures("dots_without_places")
STORED = {name for name in BY_DEFINITION if "order" not in name and "group" not in name}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[FewBitsProduct]:
    """Every product by few bits; a processor counts as a GPU that has them."""
    made: list[FewBitsProduct] = []

    class Noted(FewBitsProduct):
        def __init__(self, weight: QuantizedWeight, *arguments: Any, **keywords: Any) -> None:
            super().__init__(weight, *arguments, **keywords)
            self.definition = weight.dequantized()
            made.append(self)

        def _multiplied(self, rows: Tensor, tile: TileSize) -> Tensor:
            if rows.is_cuda or not len(rows):
                return super()._multiplied(rows, tile)
            return torch.stack([self.definition @ row for row in rows])  # a row's bits do not depend on others

    @contextmanager
    def no_store(*_: Any, **__: Any) -> Iterator[Any]:
        yield NO_STORE

    for module in (loader, paged_model, quantized_linear):
        monkeypatch.setattr(module, "reads_few_bits", lambda device: True)
    monkeypatch.setattr(quantized_linear, "can_quantize", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))  # for messages
    monkeypatch.setattr(served_weights, "kept_weights", no_store)
    monkeypatch.setattr(served_weights, "leave_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(triton_few_bits, "FewBitsProduct", Noted)
    return made


def logits(folder: Path, **settings: Any) -> Tensor:
    model = ModelConfig(str(folder), "float32", device=DEVICE.type, **settings)
    runner = ModelRunner(model, CacheConfig(num_blocks=12, block_size=8))
    return runner.forward([Span([7, 8, 40, 3, 9], 0, [3], 5), Span([1, 2], 0, [4], 2)])


@pytest.mark.parametrize("name", BY_DEFINITION)
def test_logits_are_those_of_the_dequantized_weights(
    tmp_path: Path, name: str, products: list[FewBitsProduct], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, section = BY_DEFINITION[name]
    quantize_folder(tmp_path, write, section)
    found = logits(tmp_path)
    assert len(products) == (8 if name in STORED else 0)  # two layers of qkv, output, gate and up, down
    monkeypatch.undo()
    torch.testing.assert_close(found, logits(tmp_path), rtol=1e-4, atol=1e-4)


def test_weights_that_take_more_memory_than_their_files_are_named(
    tmp_path: Path, products: list[FewBitsProduct], caplog: pytest.LogCaptureFixture
) -> None:
    write, section = BY_DEFINITION["gptq with another order"]
    quantize_folder(tmp_path, write, section)
    load_model(ModelConfig(str(tmp_path), "float32", device=DEVICE.type))
    assert "14 of 14 weights in gptq are computed in the model's dtype" in caplog.text
    assert "capability 7.5" in caplog.text
    assert not products


def test_memory_holds_few_bits_and_no_second_copy(tmp_path: Path, products: list[FewBitsProduct]) -> None:
    write, section = BY_DEFINITION["awq"]
    quantize_folder(tmp_path, write, section, is_tied=False)
    logits(tmp_path)
    assert len(products) == 9  # the head too
    assert all(product._weight.nbytes * 2 == product.num_inputs * product._num_outputs for product in products)


def test_whole_numbers_around_zero_take_four_bits() -> None:
    numbers = torch.randint(-8, 8, (32, 64), dtype=torch.int8)  # as compressed-tensors reads them
    for zeros in (None, torch.randint(-8, 8, (32, 2)).float()):
        weight = QuantizedWeight(numbers, torch.rand(32, 2), zeros=zeros)
        product = FewBitsProduct(weight, None, torch.float32, None)
        assert product._weight.nbytes * 2 == numbers.numel()
        rows = torch.randn(3, 64)
        torch.testing.assert_close(product(rows), rows @ weight.dequantized().T)


def test_outputs_that_fill_no_whole_blocks_have_their_own_scales(
    tmp_path: Path, products: list[FewBitsProduct], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_blocks(weight: Tensor) -> Any:
        rows, columns = weight.shape
        scales = torch.rand(-(-rows // 32), -(-columns // 32)) + 0.5
        spread = scales.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
        numbers = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * spread

    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}  # keys have 48 outputs
    quantize_folder(tmp_path, by_blocks, BLOCK_FP8, **sizes)
    found = logits(tmp_path)
    assert len(products) == 8
    monkeypatch.undo()
    torch.testing.assert_close(found, logits(tmp_path), rtol=1e-4, atol=1e-4)


def test_a_damaged_scale_is_refused(tmp_path: Path, products: list[FewBitsProduct]) -> None:
    write, section = BY_DEFINITION["fp8 per channel"]

    def damaged(weight: Tensor) -> Any:
        parts, expected = write(weight)
        parts["weight_scale"][3] = float("nan")
        return parts, expected

    quantize_folder(tmp_path, damaged, section)
    with pytest.raises(Exception, match="NaN or infinite"):
        logits(tmp_path)


@pytest.mark.parametrize("quantization", [Quantization.INT4, Quantization.INT8])
def test_our_own_quantization_gives_a_gpu_the_weights_of_a_processor(
    tmp_path: Path, quantization: Quantization, products: list[FewBitsProduct], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(tmp_path)
    found = logits(tmp_path, quantization=quantization)
    assert products
    monkeypatch.undo()
    if not quantized_linear.can_quantize(torch.device("cpu")):
        pytest.skip("no kernels for this processor")
    expected = logits(tmp_path, quantization=quantization)  # its kernel rounds rows to 8 bits
    assert float((found - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("name", ["gptq", "fp8 per block"])
def test_a_deterministic_model_reads_few_bits_too(tmp_path: Path, name: str, products: list[FewBitsProduct]) -> None:
    write, section = BY_DEFINITION[name]
    quantize_folder(tmp_path, write, section)
    logits(tmp_path, deterministic=True)
    assert len(products) == 8
    assert all(product.is_batch_invariant for product in products)


def test_other_families_read_few_bits_too(tmp_path: Path, products: list[FewBitsProduct]) -> None:
    write_family(tmp_path, SERVED["gemma2"]())
    logits(tmp_path, quantization=Quantization.INT8)
    assert len(products) == 11  # the head, and five in each of two layers, whose keys and values have few outputs

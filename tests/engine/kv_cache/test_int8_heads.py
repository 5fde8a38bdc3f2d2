"""A quantised pool is close to the full one at half its size, stores each token independently, and serves engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch.span import Span
from engine.config import CacheConfig, KVDtype, ModelConfig
from engine.kv_cache.pool import SCALE_BYTES, KVCache, LayerShape, block_bytes, from_int8_heads, to_int8_heads
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.attention_fixtures import DEVICE
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.drafted_texts import check_drafts_change_no_token

SHAPES = [LayerShape(num_kv_heads=2, key_dim=64, value_dim=32)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_is_off_by_half_a_scale_and_its_rounding_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = (torch.randn(50, 3, 64) * torch.logspace(-4, 4, 50)[:, None, None]).to(dtype)
    restored = from_int8_heads(to_int8_heads(heads), dtype)
    assert restored.dtype == dtype
    largest = heads.float().abs().amax(dim=-1, keepdim=True)
    assert ((restored.float() - heads.float()).abs() <= largest * (0.5 / 127 + 2**-7)).all()


def test_zeros_stay_zeros_as_int8() -> None:
    assert not from_int8_heads(to_int8_heads(torch.zeros(2, 2, 8)), torch.float32).any()
    assert not from_int8_heads(torch.zeros(2, 2, 8 + SCALE_BYTES, dtype=torch.int8), torch.float32).any()


def test_stored_int8_heads_depend_on_the_token_alone() -> None:
    heads = torch.randn(40, 2, 64)
    assert torch.equal(to_int8_heads(heads), torch.cat([to_int8_heads(token[None]) for token in heads]))


def test_a_quantised_pool_takes_the_bytes_that_are_counted() -> None:
    cache = new_cache()
    num_bytes = sum(pool.nbytes for pool in (*cache.keys, *cache.values))
    assert num_bytes == 6 * block_bytes(SHAPES, 4, torch.bfloat16, KVDtype.INT8)
    assert num_bytes < 0.53 * 6 * block_bytes(SHAPES, 4, torch.bfloat16)


def new_cache() -> KVCache:
    return KVCache(SHAPES, 6, 4, dtype=torch.float32, device=CPU, kind=KVDtype.INT8)


def test_blocks_keep_their_numbers_when_they_are_moved_copied_and_sent() -> None:
    cache, other = new_cache(), new_cache()
    key, value = torch.randn(8, 2, 64), torch.randn(8, 2, 32)
    cache.write(0, slice(0, 8), key, value)
    cache.copy_blocks([1], [4])
    cache.move([17, 18], [20, 21])
    other.import_blocks([3], cache.export_blocks([5]))
    keys, values = other.read_slots(0, torch.tensor([12, 13]))
    assert torch.equal(keys, from_int8_heads(to_int8_heads(key[5:7]), torch.float32))
    assert torch.equal(values, from_int8_heads(to_int8_heads(value[5:7]), torch.float32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "target"
    write_checkpoint(path, seed=0)
    return path


def load(folder: Path, dtype: str, cache_dtype: str, **options: bool) -> ModelRunner:
    return ModelRunner(
        ModelConfig(str(folder), dtype, "cpu", **options), CacheConfig(8, num_blocks=16, dtype=cache_dtype)
    )


def test_logits_are_near_those_of_the_full_pool_and_not_equal(folder: Path) -> None:
    spans = [Span(list(range(1, 41)), 0, list(range(5)), 40)]
    full, quantised = (load(folder, "float32", each).forward(spans) for each in ("auto", "int8"))
    assert 0 < float((quantised - full).norm() / full.norm()) < 0.1


def test_a_deterministic_model_stays_so_with_an_int8_pool(folder: Path) -> None:
    runner = load(folder, "bfloat16", "int8", deterministic=True)
    text, table = list(range(1, 41)), [7, 3, 9, 1, 5]
    expected = runner.forward([Span(text, 0, table, 40)])
    for start, end in ((0, 13), (13, 18), (18, 19), (19, 40)):
        assert torch.equal(runner.forward([Span(text[start:end], start, table, end - start)]), expected[start:end])


def test_speculation_changes_no_token_with_an_int8_pool(folder: Path) -> None:
    check_drafts_change_no_token(ModelConfig(str(folder), "float32", "cpu"), CacheConfig(num_blocks=64, dtype="int8"))


def test_engines_with_different_pools_exchange_no_blocks(folder: Path) -> None:
    difference = load(folder, "float32", "int8").kv_layout.difference(load(folder, "float32", "auto").kv_layout)
    assert difference == "dtype is torch.float32 as int8 here and torch.float32 there"


def test_the_triton_kernel_refuses_an_int8_pool(folder: Path) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    model = ModelConfig(str(folder), "float32", DEVICE.type, attention="triton")
    with pytest.raises(ConfigError, match=r"cache.dtype is 'int8'.*with Triton attention; set it to auto, or to fp8"):
        ModelRunner(model, CacheConfig(num_blocks=4, dtype="int8"))

"""The physical pool: a written slot is found in its block, and memory is allocated as it is written."""

from __future__ import annotations

import psutil
import pytest
import torch

from engine.batch.indexing import index_of
from engine.config import CacheConfig
from engine.kv_cache.pool import KVCache, LayerShape, block_bytes, pool_size
from protos.errors import ConfigError

LATENT = LayerShape(num_kv_heads=1, key_dim=12, value_dim=8, is_latent=True)
SHAPES = [
    LayerShape(num_kv_heads=2, key_dim=8, value_dim=4),
    LayerShape(num_kv_heads=1, key_dim=4, value_dim=4),
    LATENT,
]
CPU = torch.device("cpu")


def new_cache(num_blocks: int = 5, block_size: int = 4) -> KVCache:
    return KVCache(SHAPES, num_blocks, block_size, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("slots", [[0], [6], [5, 6, 7, 8, 9], [19, 0, 7]])
def test_a_written_slot_is_found_in_its_block_and_no_other_slot_changes(slots: list[int]) -> None:
    cache = new_cache()
    key, value = torch.rand(len(slots), 2, 8), torch.rand(len(slots), 2, 4)
    cache.write(0, index_of(slots, CPU), key, value)
    for row, slot in enumerate(slots):
        assert torch.equal(cache.keys[0][slot // 4, slot % 4], key[row])
        assert torch.equal(cache.values[0][slot // 4, slot % 4], value[row])
    assert int((cache.keys[0].sum(dim=(2, 3)) != 0).sum()) == len(slots)
    assert not cache.keys[1].any()


def test_layers_have_their_own_shapes() -> None:
    cache = new_cache()
    assert [tuple(keys.shape) for keys in cache.keys] == [(5, 4, 2, 8), (5, 4, 1, 4), (5, 4, 1, 12)]
    assert [tuple(values.shape) for values in cache.values] == [(5, 4, 2, 4), (5, 4, 1, 4), (5, 4, 1, 8)]


def test_a_latent_is_stored_once_and_read_as_key_and_value() -> None:
    cache, latents = new_cache(), torch.rand(3, 1, 12)
    cache.write(2, slice(3, 6), latents, latents[..., :8])
    assert cache.addresses[0][2] == cache.addresses[1][2]
    cache.move([3], [11])
    cache.copy_blocks([2], [4])
    for keys, values in (
        cache.read_slots(2, torch.tensor([19, 4, 5])),
        [heads.flatten(0, 1)[[11, 4, 5]] for heads in cache.read_blocks(2, slice(0, 5))],
    ):
        assert torch.equal(keys, latents)
        assert torch.equal(values, latents[..., :8])


def test_block_bytes_are_the_bytes_of_the_tensors() -> None:
    cache = new_cache()
    num_bytes = sum(pool.numel() * pool.itemsize for pool in (*cache.keys, *cache.values[:2]))
    assert 5 * block_bytes(SHAPES, 4, torch.float32) == num_bytes


def test_memory_is_taken_as_blocks_are_written() -> None:
    shape, process = LayerShape(num_kv_heads=8, key_dim=64, value_dim=64), psutil.Process()
    before = process.memory_info().rss
    cache = KVCache([shape], 16_384, 16, dtype=torch.float32, device=CPU)  # 1 GiB
    assert process.memory_info().rss - before < 64 << 20
    cache.keys[0][:4096] = 1.0  # 128 MiB
    assert process.memory_info().rss - before >= 128 << 20


def test_a_number_of_blocks_wins_over_bytes() -> None:
    assert pool_size(CacheConfig(num_blocks=7, memory_bytes=1), bytes_per_block=100) == 7
    assert pool_size(CacheConfig(memory_bytes=1050), bytes_per_block=100) == 10


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="99 bytes holds no block: one takes 100 bytes"):
        pool_size(CacheConfig(memory_bytes=99), bytes_per_block=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_ids", [[2], [1, 2, 3], [4, 0, 2]])
def test_exported_blocks_are_the_same_where_they_are_imported(block_ids: list[int], dtype: torch.dtype) -> None:
    source = KVCache(SHAPES, 5, 4, dtype=dtype, device=CPU)
    for pool in (*source.keys, *source.values):
        pool.copy_(torch.rand(pool.shape))
    blocks = source.export_blocks(block_ids)
    assert blocks.shape == (len(block_ids), block_bytes(SHAPES, 4, dtype))
    target = KVCache(SHAPES, 7, 4, dtype=dtype, device=CPU)
    others = [6, 1, 5][: len(block_ids)]
    target.import_blocks(others, blocks)
    for ours, theirs in zip((*target.keys, *target.values), (*source.keys, *source.values), strict=True):
        assert torch.equal(ours[others], theirs[block_ids])
        assert not ours[[each for each in range(7) if each not in others]].any()


def test_an_export_is_a_copy() -> None:
    cache = new_cache()
    blocks = cache.export_blocks([1, 2])
    cache.keys[0].fill_(1.0)
    assert not blocks.any()

"""Our kernel computes mixers as transformers' modules do, and neither chunks nor neighbours change a bit of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from engine.batch.span import SpanStates
from engine.config import CacheConfig, ModelConfig
from engine.model.runner.model_runner import ModelRunner
from engine.native.library import Instructions
from engine.recurrent.native_mixer import use_native_mixers
from protos.errors import ConfigError
from tests.engine.fixtures.hybrids import HYBRIDS, write_hybrid
from tests.engine.fixtures.native_kernels import held_to, needs_float_kernels
from tests.engine.recurrent.mixers import SPANS, Mixers, check_company

pytestmark = needs_float_kernels


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("instructions", [Instructions.AVX2, Instructions.AVX512])
def test_the_kernel_mixes_as_the_modules_do(name: str, instructions: Instructions) -> None:
    mixers = Mixers(name, use_native_mixers)
    rows, ours, theirs = mixers.rows(), mixers.pool(), mixers.pool()
    for layer in range(len(mixers.modules)):
        with held_to(instructions):
            found = mixers.mixed(layer, rows, ours, SPANS)
        expected = mixers.mixed(layer, rows, theirs, SPANS, is_ours=False)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.rows, theirs.rows, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.matrices, theirs.matrices, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_of_bfloat16_differ_by_roundings(name: str) -> None:
    exact, mixers = Mixers(name, use_native_mixers), Mixers(name, use_native_mixers, torch.bfloat16)
    rows = mixers.rows()
    found = mixers.mixed(0, rows, mixers.pool(), SPANS).float()
    expected = exact.mixed(0, rows.float(), exact.pool(), SPANS)
    assert float((found - expected).norm()) < 0.02 * float(expected.norm())


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_and_neighbours_change_no_bit(name: str, dtype: torch.dtype) -> None:
    check_company(Mixers(name, use_native_mixers, dtype))


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_one_by_one_have_the_bits_of_a_chunk(name: str) -> None:
    mixers = Mixers(name, use_native_mixers)
    rows, pool = mixers.rows(6), mixers.pool()
    whole = mixers.mixed(0, rows, pool, [(6, SpanStates(1, {6: 6}))])
    slots = [1, 7, 8, 9, 10, 11, 5]
    for row, (before, after) in enumerate(pairwise(slots)):
        found = mixers.mixed(0, rows[:, row : row + 1], pool, [(1, SpanStates(before, {1: after}))])
        assert torch.equal(found, whole[:, row : row + 1])
    for part in (pool.rows[0], pool.matrices[0]):
        assert part is None or torch.equal(part[5], part[6])


def test_a_deterministic_model_may_have_any_number_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes the last numbers of a tensor that fill no vector otherwise; the kernel does not."""
    monkeypatch.setenv("OUTRIDER_CACHE_GIB", "0")  # no start is remembered
    config = HYBRIDS["qwen3_5_text"]()
    config.linear_num_value_heads, config.linear_num_key_heads = 24, 12
    write_hybrid(tmp_path, config)
    model, cache = ModelConfig(str(tmp_path), dtype="float32", deterministic=True), CacheConfig(4, 8, memory_bytes=None)
    ModelRunner(model, cache)
    with (
        patch("engine.model.decoders.fused_decoder.use_native_mixers"),
        pytest.raises(ConfigError, match="gives the same tokens other logits"),
    ):
        ModelRunner(model, cache)

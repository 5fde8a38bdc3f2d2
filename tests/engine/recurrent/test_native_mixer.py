"""Our kernel computes mixers as transformers' modules do, and neither chunks nor neighbours change a bit of it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.batch.span import Span, SpanStates
from engine.config import CacheConfig, ModelConfig
from engine.kv_cache.state_pool import StatePool
from engine.model.attention_probe import record_layers
from engine.model.runner.model_runner import ModelRunner
from engine.native.library import Instructions
from engine.recurrent.native_mixer import NativeMixer, use_native_mixers
from engine.recurrent.state_pass import PooledStates
from protos.errors import ConfigError
from tests.engine.fixtures.hybrids import HYBRIDS, write_hybrid
from tests.engine.fixtures.native_kernels import held_to, needs_float_kernels

pytestmark = needs_float_kernels
NUM_ROWS = 26
SPANS = [
    (3, SpanStates(1, {1: 6, 3: 7})),
    (1, SpanStates(2, {1: 8})),
    (20, SpanStates(0, {2: 10, 20: 9})),
    (2, SpanStates(3, {})),
]
Spans = list[tuple[int, SpanStates]]


class Mixers:
    """The recurrent layers of a random model."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(HYBRIDS[name](), dtype=dtype, attn_implementation="eager").eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        self.shapes = record_layers(model).states
        assert use_native_mixers(model, dtype) == len(self.shapes)
        for each in model.modules():
            if isinstance(each, torch.nn.Linear):  # torch's products of a row have other bits in other company
                setattr(each, "forward", partial(_by_rows, each.weight, each.bias))  # noqa: B010 -- shadows it
        self.modules: list[Any] = [
            each for each in model.modules() if isinstance(vars(each).get("forward"), NativeMixer)
        ]
        self.dtype, self.hidden_size = dtype, model.config.hidden_size

    def rows(self, num_rows: int = NUM_ROWS) -> Tensor:
        generator = torch.Generator().manual_seed(num_rows)
        return torch.randn(1, num_rows, self.hidden_size, generator=generator).to(self.dtype)

    def pool(self) -> StatePool:
        pool = StatePool(self.shapes, 12, dtype=self.dtype, device=torch.device("cpu"))
        for part in (*pool.rows, *pool.matrices):
            if part is not None:
                part[1:6] = torch.randn(5, *part.shape[1:], generator=torch.Generator().manual_seed(1))
        return pool

    @torch.inference_mode()
    def mixed(self, layer: int, rows: Tensor, pool: StatePool, spans: Spans, *, is_native: bool = True) -> Tensor:
        made = [Span(range(size), start=9, block_table=(), num_logits=0, states=states) for size, states in spans]
        module, states = self.modules[layer], PooledStates(made, pool).at(layer)
        forward = module.forward if is_native else type(module).forward.__get__(module)
        mixed: Tensor = forward(rows, state_pass=states)
        return mixed


def _by_rows(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.cat([torch.nn.functional.linear(row, weight, bias) for row in x.split(1, dim=1)], dim=1)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("instructions", [Instructions.AVX2, Instructions.AVX512])
def test_the_kernel_mixes_as_the_modules_do(name: str, instructions: Instructions) -> None:
    mixers = Mixers(name)
    rows, ours, theirs = mixers.rows(), mixers.pool(), mixers.pool()
    for layer in range(len(mixers.modules)):
        with held_to(instructions):
            found = mixers.mixed(layer, rows, ours, SPANS)
        expected = mixers.mixed(layer, rows, theirs, SPANS, is_native=False)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.rows, theirs.rows, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.matrices, theirs.matrices, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_of_bfloat16_differ_by_roundings(name: str) -> None:
    exact, mixers = Mixers(name), Mixers(name, torch.bfloat16)
    rows = mixers.rows()
    found = mixers.mixed(0, rows, mixers.pool(), SPANS).float()
    expected = exact.mixed(0, rows.float(), exact.pool(), SPANS)
    assert float((found - expected).norm()) < 0.02 * float(expected.norm())


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_and_neighbours_change_no_bit(name: str, dtype: torch.dtype) -> None:
    mixers = Mixers(name, dtype)
    rows, pool = mixers.rows(12), mixers.pool()
    whole = mixers.mixed(0, rows, pool, [(12, SpanStates(1, {12: 6}))])
    first, second = rows[:, :5], rows[:, 5:]
    parts = [
        mixers.mixed(0, first, pool, [(5, SpanStates(1, {5: 7}))]),
        mixers.mixed(0, torch.cat((second[:, :3], second), 1), pool, [
            (3, SpanStates(2, {})), (7, SpanStates(7, {4: 9, 7: 8}))
        ])[:, 3:],
    ]  # fmt: skip
    assert torch.equal(torch.cat(parts, 1), whole)
    for part in (pool.rows[0], pool.matrices[0]):
        assert part is None or torch.equal(part[8], part[6])


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_one_by_one_have_the_bits_of_a_chunk(name: str) -> None:
    mixers = Mixers(name)
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

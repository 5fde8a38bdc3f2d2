"""Our kernel scans as torch does, and neither chunks nor neighbours change a bit of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.batch.span import Span, SpanStates
from engine.kv_cache.state_pool import StatePool, StateShape
from engine.native.library import Instructions
from engine.recurrent import state_pass
from engine.recurrent.state_pass import PooledStates
from tests.engine.fixtures.native_kernels import held_to, needs_float_kernels

pytestmark = needs_float_kernels
KINDS = pytest.mark.parametrize("kind", ["mamba2", "delta"])
SHAPES = [(4, 2, 16, 64), (3, 3, 11, 13), (2, 1, 37, 5), (1, 1, 130, 100)]  # heads, groups, depth, width
Rows = tuple[Tensor, ...]


def rows_of(kind: str, num_rows: int, shape: tuple[int, ...]) -> Rows:
    """Inputs of a scan, as its method takes them."""
    heads, groups, depth, width = shape
    generator = torch.Generator().manual_seed(num_rows)
    groups = groups if kind == "mamba2" else heads
    values, b, c = (
        torch.randn(num_rows, *size, generator=generator) for size in ((heads, width), *[(groups, depth)] * 2)
    )
    steps, decay = (torch.rand(num_rows, heads, generator=generator) for _ in range(2))
    if kind == "mamba2":
        return values, steps, decay, b, c
    return c, torch.nn.functional.normalize(b, dim=-1), values, decay, steps


def scanned(kind: str, rows: Rows, pool: StatePool, spans: list[tuple[int, SpanStates]]) -> Tensor:
    made = [Span(range(size), start=9, block_table=(), num_logits=0, states=states) for size, states in spans]
    layer = PooledStates(made, pool).at(0)
    return layer.scan_mamba2(*rows) if kind == "mamba2" else layer.scan_delta(*rows)


def pool_of(kind: str, shape: tuple[int, ...]) -> StatePool:
    heads, _, depth, width = shape
    matrices = (heads, width, depth) if kind == "mamba2" else (heads, depth, width)
    pool = StatePool([StateShape(3, 8, matrices)], 12, dtype=torch.float32, device=torch.device("cpu"))
    assert pool.matrices[0] is not None
    pool.matrices[0][1:5] = torch.randn(4, *matrices, generator=torch.Generator().manual_seed(1))
    return pool


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("instructions", [Instructions.AVX2, Instructions.AVX512])
def test_the_kernel_scans_as_torch_does(
    kind: str, shape: tuple[int, ...], instructions: Instructions, monkeypatch: pytest.MonkeyPatch
):
    spans = [
        (3, SpanStates(1, {1: 6, 3: 7})),
        (1, SpanStates(2, {1: 8})),
        (20, SpanStates(0, {20: 9})),
        (2, SpanStates(3, {})),
    ]
    rows = rows_of(kind, 26, shape)
    ours, theirs = pool_of(kind, shape), pool_of(kind, shape)
    with held_to(instructions):
        found = scanned(kind, rows, ours, spans)
    monkeypatch.setattr(state_pass, "kernels_for", lambda dtype: None)
    torch.testing.assert_close(found, scanned(kind, rows, theirs, spans), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.matrices, theirs.matrices, rtol=1e-4, atol=1e-4)


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_and_neighbours_change_no_bit(kind: str, shape: tuple[int, ...]):
    rows, pool = rows_of(kind, 12, shape), pool_of(kind, shape)
    whole = scanned(kind, rows, pool, [(12, SpanStates(1, {12: 6}))])
    first, second = tuple(each[:5] for each in rows), tuple(each[5:] for each in rows)
    parts = [
        scanned(kind, first, pool, [(5, SpanStates(1, {5: 7}))]),
        scanned(kind, tuple(torch.cat((each[:3], each)) for each in second), pool, [
            (3, SpanStates(2, {})), (7, SpanStates(7, {4: 9, 7: 8}))
        ])[3:],
    ]  # fmt: skip
    assert torch.equal(torch.cat(parts), whole)
    assert pool.matrices[0] is not None
    assert torch.equal(pool.matrices[0][8], pool.matrices[0][6])


def test_a_state_deeper_than_the_kernel_s_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    shape = (1, 1, 513, 2)
    rows, spans = rows_of("delta", 3, shape), [(3, SpanStates(1, {3: 6}))]
    found = scanned("delta", rows, pool_of("delta", shape), spans)
    monkeypatch.setattr(state_pass, "kernels_for", lambda dtype: None)
    assert torch.equal(found, scanned("delta", rows, pool_of("delta", shape), spans))

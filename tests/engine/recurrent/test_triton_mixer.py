"""Triton's mixers are transformers' modules, and no chunk, neighbour or number of rows changes a bit of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.batch.span import SpanStates
from tests.engine.fixtures.attention_fixtures import DEVICE
from tests.engine.fixtures.hybrids import HYBRIDS
from tests.engine.recurrent.mixers import SPANS, Mixers, check_company

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.recurrent import triton_mixer
from engine.recurrent.triton_mixer import use_triton_mixers

# Few heads, since each is a program; sizes that no power of two divides, and states of two programs.
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 24}
DELTA = {
    **{"linear_num_value_heads": 6, "linear_num_key_heads": 3},
    **{"linear_value_head_dim": 40, "linear_key_head_dim": 24},
}
CHANGES: dict[str, dict[str, int]] = {
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "bamba": {**MAMBA, "mamba_d_state": 72},
    "granitemoehybrid": MAMBA,
    "falcon_h1": MAMBA,
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16},
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
}
BRANCH = 9  # the one slot of a text that keeps its last state only


def mixers_of(name: str, dtype: torch.dtype = torch.float32) -> Mixers:
    return Mixers(name, use_triton_mixers, dtype, DEVICE, CHANGES.get(name, {}))


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_kernels_mix_as_the_modules_do(name: str) -> None:
    mixers = mixers_of(name)
    rows, ours, theirs = mixers.rows(), mixers.pool(), mixers.pool()
    found = mixers.mixed(0, rows, ours, SPANS)
    expected = mixers.mixed(0, rows, theirs, SPANS, is_ours=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.rows, theirs.rows, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.matrices, theirs.matrices, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "nemotron_h", "qwen3_5_text"])
def test_rows_of_bfloat16_differ_by_roundings(name: str) -> None:
    exact, mixers = mixers_of(name), mixers_of(name, torch.bfloat16)
    rows = mixers.rows()
    found = mixers.mixed(0, rows, mixers.pool(), SPANS).float()
    expected = exact.mixed(0, rows.float(), exact.pool(), SPANS)
    assert float((found - expected).norm()) < 0.02 * float(expected.norm())


@pytest.mark.parametrize("name", ["lfm2", "bamba", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_and_neighbours_change_no_bit(name: str, dtype: torch.dtype) -> None:
    check_company(mixers_of(name, dtype))


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_5_text"])
@pytest.mark.parametrize("slots", [[1, 7, 8, 10, 11, 5], [1, *[BRANCH] * 5]], ids=["a slot each", "one slot"])
def test_rows_one_by_one_have_the_bits_of_a_chunk(name: str, slots: list[int]) -> None:
    """A branch of a draft model keeps its last state alone: it reads and writes one slot."""
    mixers = mixers_of(name)
    rows, pool = mixers.rows(5), mixers.pool()
    whole = mixers.mixed(0, rows, pool, [(5, SpanStates(1, {**dict.fromkeys(range(1, 5), 6), 5: 6}))])
    for row, (before, after) in enumerate(pairwise(slots)):
        found = mixers.mixed(0, rows[:, row : row + 1], pool, [(1, SpanStates(before, {1: after}))])
        assert torch.equal(found, whole[:, row : row + 1])
    for part in (pool.rows[0], pool.matrices[0]):
        assert part is None or torch.equal(part[slots[-1]], part[6])


def test_a_span_of_several_rows_never_keeps_a_state_where_it_began() -> None:
    """Its rows are computed next to each other, so one would write what another reads."""
    mixers = mixers_of("lfm2")
    with pytest.raises(AssertionError, match="before their span"):
        mixers.mixed(0, mixers.rows(2), mixers.pool(), [(2, SpanStates(1, {2: 1}))])


@pytest.mark.parametrize(("name", "expected"), [("lfm2", 1), ("mamba2", 3), ("qwen3_next", 3)])
def test_a_recurrent_layer_takes_few_launches(name: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    class Counted:
        def __init__(self, kernel: str) -> None:
            self.kernel, self.launch = kernel, getattr(triton_mixer, kernel)

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self.kernel)
            return self.launch[grid]

    for kernel in ("convolve_rows", "scan_heads", "gate_and_norm"):
        monkeypatch.setattr(triton_mixer, kernel, Counted(kernel))
    mixers = mixers_of(name)
    mixers.mixed(0, mixers.rows(4), mixers.pool(), [(3, SpanStates(1, {1: 6, 3: 7})), (1, SpanStates(2, {1: 8}))])
    assert len(launched) == len(set(launched)) == expected

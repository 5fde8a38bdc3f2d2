"""Norms by our kernel on GPUs are torch's, and a row has the same bits in any company; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from engine.model.decoders.row_operations import TorchRows
from tests.engine.fixtures.attention_fixtures import DEVICE

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kv_cache.triton_store import store
from engine.model.decoders.triton_rows import TritonRows
from engine.model.linear.triton_product import gate_joined

EPSILON = 1e-5
ROUNDING = {"rtol": 0.02, "atol": 1e-6}  # the interpreter cuts numbers to bfloat16 instead of rounding them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [96, 128, 1000])
def test_sums_and_norms_are_torchs_in_any_company(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    hidden, delta = (torch.randn(20, size, generator=generator).to(DEVICE, dtype) for _ in range(2))
    weight = torch.rand(size, generator=generator).to(DEVICE, dtype)
    ours, theirs = TritonRows(EPSILON), TorchRows(EPSILON)
    for added in (None, delta):
        total, normed = ours.add_norm(hidden, None if added is None else added.clone(), weight)
        expected_total, expected = theirs.add_norm(hidden, added, weight)
        torch.testing.assert_close(total, expected_total, **ROUNDING)
        torch.testing.assert_close(normed, expected, **ROUNDING)
        for start, end in ((0, 1), (3, 7), (5, 20)):
            part = None if added is None else added[start:end].clone()
            assert torch.equal(ours.add_norm(hidden[start:end], part, weight)[1], normed[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed_each_by_its_own_weight(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(9, 8, 24, generator=generator).to(DEVICE, dtype)
    weight = torch.rand(6, 24, generator=generator).to(DEVICE, dtype)
    normed = TritonRows(EPSILON).norm_heads(heads, 6, weight)
    torch.testing.assert_close(normed, TorchRows(EPSILON).norm_heads(heads, 6, weight), **ROUNDING)
    assert torch.equal(TritonRows(EPSILON).norm_heads(heads[4:5], 6, weight), normed[4:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_rotated", "size"), [(9, 6, 24), (40, 36, 32), (3, 2, 16)])
def test_heads_are_rotated_as_torch_does(num_heads: int, num_rotated: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    heads = torch.randn(5, num_heads, size, generator=generator).to(DEVICE, dtype)
    table = torch.randn(5, 2, size, generator=generator).to(DEVICE, dtype)
    expected = TorchRows(EPSILON).rotate(heads.float(), num_rotated, table.float()).to(dtype)
    rotated = TritonRows(EPSILON).rotate(heads, num_rotated, table)
    torch.testing.assert_close(rotated, expected, rtol=ROUNDING["rtol"], atol=1e-2 if dtype.itemsize < 4 else 1e-5)
    assert torch.equal(TritonRows(EPSILON).rotate(heads[3:4], num_rotated, table[3:4]), rotated[3:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 1500), (2, 3, 40)])
def test_a_gate_is_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    joined = (30 * torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(3))).to(
        DEVICE, dtype
    )
    gate, up = joined.float().chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    torch.testing.assert_close(gate_joined(joined), expected, rtol=ROUNDING["rtol"], atol=1e-5)


def test_keys_and_values_are_stored_in_their_slots_and_nowhere_else() -> None:
    generator = torch.Generator().manual_seed(4)
    qkv = torch.randn(6, 8, 24, generator=generator).to(DEVICE)
    key, value = qkv[:, 4:6], qkv[:, 6:8, :20]  # neighbours in memory, of other sizes
    keys, values = torch.zeros(40, 2, 24, device=DEVICE), torch.zeros(40, 2, 20, device=DEVICE)
    slots = torch.tensor([3, 39, 0, 17, 16, 5], device=DEVICE)
    expected = keys.index_copy(0, slots, key), values.index_copy(0, slots, value)
    store(keys, values, slots, key, value)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])

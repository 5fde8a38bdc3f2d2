"""Small sums between ranks on GPUs: which tensors the kernel takes, and when NCCL sums all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from engine.model.tensor_parallel import SmallSums, small_sums

NUM_RANKS = 4


def sums_of(num_elements: int) -> SmallSums:
    """Sums of ranks that all have the same tensor; a rank reads what has been copied to shared memory."""

    def sum_by(shared: Tensor, partial: Tensor) -> None:
        shared.copy_(partial)
        partial.copy_(shared * NUM_RANKS)

    return SmallSums(torch.zeros(num_elements), sum_by)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_few_rows_are_summed_in_place(dtype: torch.dtype) -> None:
    sums = sums_of(64)
    rows = torch.arange(48).view(3, 16).to(dtype)
    before = rows.clone()
    assert sums.add(rows)
    assert torch.equal(rows, before * NUM_RANKS)


@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(torch.ones(68), id="larger than shared memory"),
        pytest.param(torch.ones(8, dtype=torch.float16), id="a dtype without a kernel"),
        pytest.param(torch.ones(6), id="not whole units of 16 bytes"),
        pytest.param(torch.ones(12)[2:10], id="not at a unit"),
        pytest.param(torch.ones(8, 8)[:, :4], id="not contiguous"),
        pytest.param(torch.ones(0), id="empty"),
    ],
)
def test_other_tensors_are_left_to_nccl(refused: Tensor) -> None:
    assert not sums_of(64).add(refused)
    assert bool((refused == 1).all())


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Four ranks with a card each, as the third of them sees torch; a test changes its fields."""
    found = SimpleNamespace(has_access=True, others_agree=True, error=None, excess=0, num_trials=0)

    def rendezvous(shared: Tensor, name: str) -> None:
        if found.error is not None:
            raise found.error

    def kernel(shared: Tensor, partial: Tensor, operation: str, name: str, out: Tensor) -> None:
        assert (operation, name) == ("sum", "ranks")
        found.num_trials += 1
        out.copy_(partial / 3 * 10 + found.excess)  # this rank has 3 of 1 + 2 + 3 + 4

    def all_reduce(agreed: Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MIN
        agreed.mul_(int(found.others_agree))

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments, device, **settings: make(*arguments, **settings)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: found.has_access)
    monkeypatch.setattr(torch, "full", on_cpu(torch.full))
    monkeypatch.setattr(torch, "tensor", on_cpu(torch.tensor))
    monkeypatch.setattr(_symmetric_memory, "empty", on_cpu(torch.empty))
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out", kernel, raising=False)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    small_sums.cache_clear()
    return found


class Group:
    """The group of the ranks."""

    group_name = "ranks"

    def rank(self) -> int:
        return 2

    def size(self) -> int:
        return NUM_RANKS


def test_sums_are_opened_once_and_tried(ranks: SimpleNamespace) -> None:
    group: Any = Group()
    sums = small_sums(group)
    assert sums is not None
    assert small_sums(group) is sums
    assert ranks.num_trials == 1
    part = torch.full_like(torch.ones(8), 3.0)
    assert sums.add(part)
    assert part.tolist() == [10.0] * 8


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"has_access": False}, "GPU 2 has no access to the memory of all others"),
        ({"error": RuntimeError("no fabric\nmore")}, "RuntimeError: no fabric"),
        ({"others_agree": False}, "another rank has no access"),
        ({"excess": 1}, "a sum was wrong"),
    ],
)
def test_nccl_sums_everything_if_one_rank_cannot(
    what: dict[str, object], reason: str, ranks: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank whose kernel waits for one that another does not start would wait for ever."""
    vars(ranks).update(what)
    group: Any = Group()
    with caplog.at_level(logging.INFO):
        assert small_sums(group) is None
    assert caplog.messages == [f"NCCL sums small messages between ranks too: {reason}"]
    assert ranks.num_trials == (1 if "excess" in what else 0)

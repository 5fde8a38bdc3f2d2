"""Packed weights are copies at the begin of cache lines, close together, in large pages where the system has them."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.linear.weight_store import empty_in_large_pages

PAGE_BYTES = 2 << 20
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def copied(weight: Tensor) -> Tensor:
    """Return a copy of a weight in large pages."""
    return empty_in_large_pages(weight.shape, weight.dtype).copy_(weight)


@pytest.mark.parametrize("dtype", [torch.int8, torch.half, torch.bfloat16])
def test_a_copy_has_the_numbers_and_shape_of_its_weight(dtype: torch.dtype) -> None:
    weight = torch.arange(3 * 5 * 7).view(3, 5, 7).to(dtype)
    copy = copied(weight)
    assert torch.equal(copy, weight)
    assert copy.dtype is dtype
    weight.zero_()
    assert copy.any()


def test_copies_begin_at_cache_lines_and_share_no_byte() -> None:
    copies = [copied(torch.full((each,), each, dtype=torch.int8)) for each in range(1, 100)]
    assert all(copy.data_ptr() % 64 == 0 for copy in copies)
    assert all((copy == value).all() for value, copy in enumerate(copies, start=1))


def test_small_weights_fill_a_page_together() -> None:
    pages = {copied(torch.zeros(10_000, dtype=torch.int8)).data_ptr() // PAGE_BYTES for _ in range(400)}
    assert len(pages) <= 3


def test_one_larger_than_a_region_is_whole() -> None:
    weight = torch.ones(40 << 20, dtype=torch.int8)
    assert torch.equal(copied(weight), weight)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE") or not MODE.exists(), reason="no transparent huge pages here")
def test_the_system_is_asked_for_large_pages() -> None:
    address = copied(torch.ones(40 << 20, dtype=torch.int8)).data_ptr()
    assert "hg" in _flags(address).split()  # madvise(MADV_HUGEPAGE)


def _flags(address: int) -> str:
    """The `VmFlags` of the mapping that holds an address."""
    mappings = re.finditer(r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S)
    return next(each[3] for each in mappings if int(each[1], 16) <= address < int(each[2], 16))

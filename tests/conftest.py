"""What every test run needs, before the first import of ours.

Where there is no GPU, Triton's kernels run in its interpreter, which must be chosen before its first import. Under
`pytest -n 2` one worker takes all tests that start a Ray cluster, one after the other; they mostly wait.
"""

import os
from pathlib import Path

import pytest
import torch

SERVED = Path(__file__).parent / "serve"

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(SERVED):
            item.add_marker(pytest.mark.xdist_group("ray"))
    items.sort(key=lambda item: not item.path.is_relative_to(SERVED))  # stable: the longest line starts first

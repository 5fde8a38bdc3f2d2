"""As many of torch's threads as an operation on scores is worth.

torch divides what has a few thousand numbers among all of its threads, and waits for each of them. Where a core has
other work (a frontend, a helper of our kernels) the noise of one row takes a hundred times as long on two threads as on
one. Each number is computed alone, so its bits do not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_NUMBERS_PER_THREAD = 1 << 18  # some milliseconds of noise: worth the wait for a core


@contextmanager
def limited_threads(scores: Tensor) -> Iterator[None]:
    """Within it, torch computes with threads enough for operations on `scores`, and not with more than before."""
    num_threads = torch.get_num_threads()
    num_wanted = min(num_threads, 1 + scores.numel() // _NUMBERS_PER_THREAD)
    if num_wanted == num_threads or scores.device.type != "cpu":
        yield
        return
    torch.set_num_threads(num_wanted)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)

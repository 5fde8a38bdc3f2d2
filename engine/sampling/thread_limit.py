"""Limits torch's threads by the size of an operation on scores.

torch splits even a few thousand numbers among all its threads and waits for each thread. If a core has other work (a
frontend, a helper of our kernels), the noise of one row takes a hundred times as long on two threads as on one. The
number of threads does not change any bits, since each number is computed independently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def limited_threads(scores: Tensor) -> Iterator[None]:
    """Limit torch's threads inside the context to a number that fits operations on `scores`; never raise it."""
    num_threads = torch.get_num_threads()
    # Some milliseconds of noise are worth waiting for a core.
    num_wanted = min(num_threads, 1 + scores.numel() // (1 << 18))
    if num_wanted == num_threads or scores.device.type != "cpu":
        yield
        return
    torch.set_num_threads(num_wanted)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)

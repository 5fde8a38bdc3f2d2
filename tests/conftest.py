"""What every run of the tests needs before its first test.

Where there is no GPU, Triton's kernels run in its interpreter, which must be chosen before its first import.
"""

import gc
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """What was imported lives as long as the run, and a sampling experiment makes objects by the million: walking all
    of them again and again took a fifth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)

"""Settings of a test run: Triton's interpreter, the garbage collector, and what forked processes have loaded already.

Where there is no GPU, Triton's kernels run in its interpreter, which must be chosen before Triton's first import.
"""

import gc
import multiprocessing
import os

import hypothesis
import torch

gc.disable()  # until the tests are collected: walks over what they import take a fifth of the time
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("shared machine", deadline=None)  # no test bounds its own wall time
hypothesis.settings.load_profile("shared machine")

# Processes of the "forkserver" context are copies of one that has imported these: none of them imports torch again.
multiprocessing.set_forkserver_preload(["actors.draft.draft_process", "actors.target.target_process"])


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection: sampling experiments create millions of objects.

    Walking all imported ones again and again took a fifth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()

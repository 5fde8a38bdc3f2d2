"""Settings of a test run: Triton's interpreter, the garbage collector, and what forked processes have loaded already.

Where there is no GPU, Triton's kernels run in its interpreter, which must be chosen before Triton's first import.
"""

import gc
import multiprocessing
import os
import sys
from types import FrameType

import hypothesis
import pytest
import torch

gc.disable()  # until the tests are collected: walks over their imports take a fifth of the time
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["OUTRIDER_CACHE_GIB"] = "0"  # every start packs and checks its weights, except in tests of the cache

hypothesis.settings.register_profile("shared machine", deadline=None)  # no test bounds its own wall time
hypothesis.settings.load_profile("shared machine")

# Processes of the "forkserver" context are copies of one that has imported these: none of them imports torch again.
multiprocessing.set_forkserver_preload(["actors.draft.draft_process", "actors.target.target_process"])


_frames_of_threads = sys._current_frames


def _frames_without_collection() -> dict[int, FrameType]:
    """`sys._current_frames`, which slipcover calls, in a Python that collects garbage while it holds the lock of it.

    What is collected may wait for that lock for ever (gh-106883, mended in 3.11.5).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _frames_of_threads()
    finally:
        if was_enabled:
            gc.enable()


if sys.version_info < (3, 11, 5):
    sys._current_frames = _frames_without_collection


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection: sampling experiments create millions of objects.

    Walking all imported ones again and again took a fifth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture
def patient_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a target wait for its draft process as long as a loaded machine may take."""
    monkeypatch.setattr("actors.draft.draft_link.AdaptiveTimeout.allowed_s", 30.0)

"""A draft process for benchmarks whose target runs in this process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path

from actors.draft.channel_proposer import ChannelProposer
from actors.draft.draft_link import DRAFT_SOCKET
from actors.draft.draft_process import serve_draft
from actors.process.frames import private_folder
from actors.settings import PairSettings

CORES = sorted(os.sched_getaffinity(0))  # the last core is the draft's, the others are the target's
CONNECT_TIMEOUT_S = 120.0


def start_draft(
    settings: PairSettings, stack: ExitStack, cores: Seq[int] = CORES[-1:], timeout_s: float = CONNECT_TIMEOUT_S
) -> ChannelProposer:
    """Return the connected channel to a new draft process on `cores`; `stack` ends the process."""
    folder = private_folder()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_serve, args=(settings, folder, cores), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    channel = ChannelProposer(folder / DRAFT_SOCKET)
    deadline_s = time.monotonic() + timeout_s
    while not channel.stats.is_connected:
        if not process.is_alive():
            raise ConnectionError(f"the draft process ended with code {process.exitcode}")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the draft did not connect within {timeout_s} s")
        time.sleep(0.05)
        channel.flush()
    return channel


def own_cores(cores: Seq[int]) -> None:
    """Bind this thread, and threads it starts, to these cores. A process that wakes another tends to share its core."""
    os.sched_setaffinity(0, cores)


def _serve(settings: PairSettings, folder: Path, cores: Seq[int]) -> None:
    own_cores(cores)
    serve_draft(settings, folder, lambda: None)

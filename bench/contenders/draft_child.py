"""A draft process of its own for benchmarks in this process, as the pair's draft actor has one."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path

from actors.channel.channel_proposer import ChannelProposer
from actors.channel.draft_messages import DRAFT_SOCKET
from actors.draft.draft_process import serve_draft
from actors.process.socket_folder import private_folder
from actors.settings import PairSettings

CORES = sorted(os.sched_getaffinity(0))  # the first ones are the target's, the last one is the draft's
CONNECT_TIMEOUT_S = 120.0


def start_draft(settings: PairSettings, stack: ExitStack) -> ChannelProposer:
    """Return the connected channel to a new draft process on the last core; `stack` ends the process."""
    folder = private_folder()
    process = multiprocessing.get_context("forkserver").Process(target=_serve, args=(settings, folder), daemon=True)
    process.start()
    stack.callback(process.kill)
    channel = ChannelProposer(folder / DRAFT_SOCKET)
    deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
    while not channel.stats.is_connected:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the draft was not there after {CONNECT_TIMEOUT_S} s")
        time.sleep(0.05)
        channel.flush()
    return channel


def own_cores(cores: Seq[int]) -> None:
    """Keep this thread, and those it starts, to these cores: a process that wakes another tends to share its own."""
    os.sched_setaffinity(0, cores)


def _serve(settings: PairSettings, folder: Path) -> None:
    own_cores(CORES[-1:])
    serve_draft(settings, folder, lambda: None)

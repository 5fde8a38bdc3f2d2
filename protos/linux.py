"""Calls of Linux that frontends and pairs share: the user behind a Unix socket, a process's scheduling policy."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

_THREADS = "/proc/self/task"


def is_own(peer: socket.socket) -> bool:
    """True if the process at the other end of a connected Unix socket belongs to our user."""
    _, user_id, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user_id == os.getuid())


def wait_for_cores() -> None:
    """Have this process's threads wait for a core where all compute: one that wakes takes none from a running thread.

    The threads of a model's pass work on parts of one product. Where one loses its core with a part in hand, all wait
    for it: a frontend that takes a core for a millisecond holds up the pass for a millisecond, not for half of one. A
    thread that waits (Linux' SCHED_BATCH) runs between two passes, on the core that a helper gives up, or in its turn.
    Threads that are started later inherit it. It does nothing where the system has no such thing.
    """
    if not hasattr(os, "SCHED_BATCH") or not os.path.isdir(_THREADS):
        return
    for thread in os.listdir(_THREADS):
        with suppress(OSError):  # it has ended, or the system forbids it
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))

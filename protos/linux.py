"""Calls of Linux that all processes share: the user behind a Unix socket, and the scheduling policy of threads."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
from contextlib import suppress

SLICE_S = 0.008  # of a core, for threads that compute: a short pass on a processor, and no long wait for a frontend
_THREADS = "/proc/self/task"
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # sched_setattr, for which Python has no function
_ATTRIBUTES = "IIQiIQQQ"  # of a thread: size, policy, flags, niceness, priority, slice in ns, two for other policies


def is_own(peer: socket.socket) -> bool:
    """True if the process at the other end of a connected Unix socket belongs to our user."""
    _, user_id, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user_id == os.getuid())


def wait_for_cores() -> None:
    """Have this process's threads wait for a core where all compute: one that wakes takes none from a running thread.

    The threads of a model's pass work on parts of one product. Where one loses its core with a part in hand, all wait
    for it: a frontend that takes a core for a millisecond holds up the pass for a millisecond, not for half of one. A
    thread that waits (Linux' SCHED_BATCH) runs between two passes, on the core that a helper gives up, or in its turn.
    Threads and processes that are started later inherit it. It does nothing where the system has no such thing.
    """
    if not hasattr(os, "SCHED_BATCH") or not os.path.isdir(_THREADS):
        return
    for thread in os.listdir(_THREADS):
        with suppress(OSError):  # it has ended, or the system forbids it
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def keep_cores() -> None:
    """Give this thread, and those that it starts, slices of `SLICE_S` of a core, and end its waiting for one.

    A thread whose slice of time is over gives its core to those that wait, with a part of a product in hand: by default
    after 1.4 ms, on two cores. With longer slices they find one between two passes more often. Linux gives those from
    6.12 on; before that, this only ends the waiting (`wait_for_cores`) that a thread inherits from its process.
    """
    if not hasattr(os, "SCHED_OTHER"):
        return
    with suppress(OSError):  # the system forbids it
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if (number := _SET_ATTRIBUTES.get(platform.machine())) is not None:
        size, niceness = struct.calcsize(_ATTRIBUTES), os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack(_ATTRIBUTES, size, os.SCHED_OTHER, 0, niceness, 0, int(SLICE_S * 1e9), 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)  # an error is ignored: default slices do, too

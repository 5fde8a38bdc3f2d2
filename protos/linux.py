"""Linux calls that processes share: the user of a socket's peer, scheduling of threads, and death with the parent."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import struct
import sys
from contextlib import suppress

SLICE_S = 0.008  # of a core, for compute threads: a short pass fits on one processor, and frontends do not wait long
_THREADS = "/proc/self/task"
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # the number of sched_setattr, a call that Python lacks
_ATTRIBUTES = "IIQiIQQQ"  # of a thread: size, policy, flags, niceness, priority, slice in ns, two for other policies


def is_own(peer: socket.socket) -> bool:
    """True if the process at the other end of a connected Unix socket belongs to our user."""
    _, user_id, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user_id == os.getuid())


def wait_for_cores() -> None:
    """Schedule this process as SCHED_BATCH, so that its threads never preempt a running compute thread.

    The threads of a model's pass compute parts of one product. When one loses its core, all wait for it: a frontend
    that takes a core for 1 ms delays the pass by 1 ms. A SCHED_BATCH thread runs between two passes, on a core that a
    helper thread gives up, or in its turn. Threads and processes started later inherit the policy. Without SCHED_BATCH
    this does nothing.
    """
    if not hasattr(os, "SCHED_BATCH") or not os.path.isdir(_THREADS):
        return
    for thread in os.listdir(_THREADS):
        with suppress(OSError):  # the thread has ended, or the system forbids it
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def keep_cores() -> None:
    """Give this thread and its future children slices of `SLICE_S` of a core, and undo `wait_for_cores` for them.

    A thread whose slice ends gives its core to waiting threads, even in the middle of a product: by default after 1.4
    ms on two cores. With longer slices, waiting threads run between two passes more often. Linux supports custom slices
    from 6.12 on; on older kernels this only undoes the inherited `wait_for_cores`.
    """
    if not hasattr(os, "SCHED_OTHER"):
        return
    with suppress(OSError):  # the system forbids it
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if (number := _SET_ATTRIBUTES.get(platform.machine())) is not None:
        size, niceness = struct.calcsize(_ATTRIBUTES), os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack(_ATTRIBUTES, size, os.SCHED_OTHER, 0, niceness, 0, int(SLICE_S * 1e9), 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)  # an error is ignored: default slices work too


def die_with_parent() -> None:
    """Let the kernel kill this process, even a stopped one, when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl(2)

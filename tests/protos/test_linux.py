"""Scheduling policies of threads; each test runs a program of its own, so that this process keeps its policy."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from protos.linux import SLICE_S

_WAITING = """
import os, threading
from protos.linux import wait_for_cores

begin, end, policies = threading.Event(), threading.Event(), {}

def look(name):
    begin.wait()
    policies[name] = os.sched_getscheduler(0)

before = threading.Thread(target=look, args=("a thread from before",))
before.start()
wait_for_cores()
begin.set()
look("this thread")
after = threading.Thread(target=look, args=("a thread from after",))
after.start()
before.join(), after.join()
print({name for name, policy in policies.items() if policy != os.SCHED_BATCH} or len(policies))
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
def test_all_threads_of_a_process_wait_for_cores() -> None:
    found = subprocess.run([sys.executable, "-c", _WAITING], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "3", found.stderr


_KEEPING = """
import ctypes, os, struct, threading
from protos.linux import keep_cores, wait_for_cores

def look():
    attributes = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(315, 0, attributes, 48, 0) == 0, "sched_getattr of x86-64"
    _, policy, _, niceness, _, slice_ns, _, _ = struct.unpack("IIQiIQQQ", attributes.raw)
    found.append((policy, niceness, slice_ns))

def keep():
    os.nice(3)
    keep_cores()
    look()
    helper = threading.Thread(target=look)
    helper.start(), helper.join()

found = []
wait_for_cores()
compute = threading.Thread(target=keep)
compute.start(), compute.join()
look()
print(*(number for each in found for number in each))
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or not hasattr(os, "SCHED_BATCH"), reason="calls Linux by number")
def test_a_thread_that_computes_gets_long_slices_and_so_do_those_it_starts() -> None:
    found = subprocess.run([sys.executable, "-c", _KEEPING], capture_output=True, text=True, check=True, timeout=60)
    *kept, policy, niceness, slice_ns = map(int, found.stdout.split())
    assert kept[0::3] == [os.SCHED_OTHER] * 2
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert kept[1::3] == [min(before + 3, 19)] * 2, "they are as nice as they were"
    assert (policy, niceness) == (os.SCHED_BATCH, before), "others are as they were"
    if _has_slices():
        assert kept[2::3] == [int(SLICE_S * 1e9)] * 2
        assert slice_ns < SLICE_S * 1e9


def _has_slices() -> bool:
    major, minor, *_ = platform.release().split(".")
    return (int(major), int(minor)) >= (6, 12)

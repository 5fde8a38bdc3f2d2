"""Frontends wait for cores; nothing of this process is changed here, so the threads are a program's of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
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
behind = threading.Thread(target=look, args=("a thread from behind",))
behind.start()
before.join(), behind.join()
print({name for name, policy in policies.items() if policy != os.SCHED_BATCH} or len(policies))
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
def test_all_threads_of_a_process_wait_for_cores() -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "3", found.stderr

"""The thread that computes in an actor: ready, failed, and of a lower priority than the others of its process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from actors.process.actor_thread import ActorThread, without_compiler
from protos.errors import ConfigError, EngineError

_ENDS_LATE = """
import time
from actors.process.actor_thread import ActorThread

def main(is_ready):
    is_ready()
    raise ValueError("a step failed")

ActorThread("Late", main).wait_ready(10.0)
time.sleep(30.0)
"""


def test_a_failure_before_it_serves_reaches_the_waiting_one(caplog: pytest.LogCaptureFixture):
    """A mistake of the operator's is logged as one line, without a traceback."""

    def refuse(is_ready: Callable[[], None]) -> None:
        raise ConfigError("the pool is too small")

    with pytest.raises(ConfigError, match="the pool is too small"):
        ActorThread("Refuses", refuse).wait_ready(10.0)
    assert "Refuses failed: the pool is too small" in caplog.text
    assert "Traceback" not in caplog.text


def test_an_unexpected_failure_names_the_thread(caplog: pytest.LogCaptureFixture):
    def fail(is_ready: Callable[[], None]) -> None:
        raise ValueError("out of range")

    with pytest.raises(EngineError, match="Fails: out of range"):
        ActorThread("Fails", fail).wait_ready(10.0)
    assert "Traceback" in caplog.text


def test_a_start_that_takes_too_long_is_an_error():
    with pytest.raises(EngineError, match=r"did not start within 0\.1 s"):
        ActorThread("Hangs", lambda is_ready: time.sleep(1.0)).wait_ready(0.1)


def test_a_thread_that_ends_while_it_serves_ends_its_process():
    began_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", _ENDS_LATE], capture_output=True, text=True, timeout=30.0)
    assert (ended.returncode, "a step failed" in ended.stderr) == (1, True)
    assert time.monotonic() - began_s < 25.0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is a process's")
def test_only_the_thread_and_those_it_starts_give_way():
    found: list[int] = []

    def note() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def compute(is_ready: Callable[[], None]) -> None:
        note()
        child = threading.Thread(target=note)
        child.start()
        child.join()
        is_ready()

    before = os.getpriority(os.PRIO_PROCESS, 0)
    ActorThread("Gives way", compute, niceness=3).wait_ready(10.0)
    assert found == [min(before + 3, 19)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_libraries_may_ask_whether_the_compiler_is_installed_while_a_stand_in_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with without_compiler():
        spec = find_spec("torch._dynamo")
    assert spec is not None
    assert spec.name == "torch._dynamo"

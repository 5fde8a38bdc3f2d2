"""A signal ends a command, with its processes and its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.local.serve_environment import free_port, is_free

pytestmark = pytest.mark.timeout(200)
ROOT = Path(__file__).parents[3]


@contextmanager
def running(tmp_path: Path, *arguments: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a command with a folder of its own for temporary files."""
    folder = tmp_path / "t"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 100
    while not condition():
        assert process.poll() is None, "the command has ended"
        assert time.monotonic() < end_s
        time.sleep(0.02)


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def ends(process: psutil.Process) -> bool:
    try:
        process.wait(30)
    except psutil.TimeoutExpired:
        process.kill()
        return False
    return True


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_server_stops_while_it_loads_its_models(tmp_path: Path, number: int, status: int) -> None:
    with running(tmp_path, "serve", "demo", "--no-ray", "--port", str(free_port()), "--grpc-port", "0") as process:
        wait_for(process, lambda: has_torch(process.pid))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (status, "")
    assert not [*(tmp_path / "t").iterdir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_cuts_the_streams_and_ends_the_server_in_order(tmp_path: Path, number: int) -> None:
    port = free_port()
    request = {"prompt": "def", "max_tokens": 8000, "n": 8, "ignore_eos": True, "stream": True}
    with running(tmp_path, "serve", "demo", "--no-ray", "--port", str(port), "--grpc-port", "0") as process:
        wait_for(process, lambda: not is_free("127.0.0.1", port))
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=request, timeout=60) as answer:
            parts = answer.iter_bytes()
            assert next(parts).startswith(b"data: {")
            process.send_signal(number)
            time.sleep(0.5)  # a server that drains
            assert process.poll() is None
            process.send_signal(number)
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def test_a_server_whose_output_nobody_reads_ends_with_an_error(tmp_path: Path) -> None:
    arguments = ["serve", "demo", "--no-ray", "--port", str(free_port()), "--grpc-port", "0"]
    with running(tmp_path, *arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(100) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_of_a_trial_ends_with_its_command(tmp_path: Path, number: int) -> None:
    traffic = tmp_path / "log.jsonl"
    traffic.write_text(json.dumps({"prompt": "def", "max_tokens": 2000, "ignore_eos": True}))
    with running(tmp_path, "try", "demo", "--traffic", str(traffic), "--max-tokens", "2000") as process:
        command = psutil.Process(process.pid)
        wait_for(process, lambda: any(has_torch(each.pid) for each in command.children()))
        child = next(each for each in command.children() if has_torch(each.pid))
        process.send_signal(number)
        process.wait(30)
        assert ends(child)

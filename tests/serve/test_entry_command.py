"""`outrider serve` on Ray as its user runs it: from the command to its last process, while another cluster runs."""

from __future__ import annotations

import os
import pty
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.local.serve_environment import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
START_S, STOP_S = 240.0, 120.0


class Terminal:
    """A terminal that runs a command; `text` is its output so far."""

    def __init__(self) -> None:
        self.text = ""
        self._leader, self.follower = pty.openpty()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                self.text += os.read(self._leader, 4096).decode(errors="replace")
            except OSError:  # the command has ended
                return

    def wait_for(self, process: subprocess.Popen[bytes], *words: str) -> None:
        """Wait until one of these is there."""
        end_s = time.monotonic() + START_S
        while not any(each in self.text for each in words):
            assert process.poll() is None, self.text
            assert time.monotonic() < end_s, self.text
            time.sleep(0.1)


def cluster_folders() -> set[Path]:
    return set(Path("/tmp").glob("outray-*"))


@pytest.fixture
def folder_for_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short one, since a socket's path has 107 bytes."""
    folder = Path(f"/tmp/op-{os.getpid()}")
    folder.mkdir(mode=0o700)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_a_server_starts_races_answers_and_leaves_nothing(tmp_path: Path, folder_for_ray: Path) -> None:
    http, grpc = free_ports(2)
    terminal, before = Terminal(), cluster_folders()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OUTRIDER_"))}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder_for_ray), "http_proxy": "http://127.0.0.1:9"}
    options = ["--port", str(http), "--grpc-port", str(grpc), "--set", "tune.log=log"]
    process = subprocess.Popen(
        [Path(sys.executable).with_name("outrider"), "serve", "demo", *options],
        cwd=tmp_path,
        env=environment,
        stdout=terminal.follower,
        stderr=terminal.follower,
    )
    try:
        terminal.wait_for(process, "[3/3] ready")
        terminal.wait_for(process, "identical tokens, ", "no race: it would take more than")  # on a busy machine
        request = {"prompt": "def main():", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{http}/v1/completions", json=request, timeout=60.0, trust_env=False)
        assert answer.json()["usage"]["completion_tokens"] == 8
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) > 5
        (own,) = cluster_folders() - before
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert (tmp_path / "log").is_dir()
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
        assert "failed" not in terminal.text
        _, left = psutil.wait_procs(children, timeout=20)
        assert not left
        assert not own.exists()
        assert (tmp_path / "log").is_dir(), "what clients wrote is kept"
    finally:
        process.kill()

"""What a cluster leaves behind whose own process is killed is ended by the next one that starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.local_cluster import end_leftovers

SLEEP = "import time; time.sleep(60)"


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start what looks like the HAProxy of a cluster with this folder."""
    folder.mkdir()
    return subprocess.Popen(["haproxy", "-c", SLEEP, "-f", f"{folder}/haproxy.cfg"], executable=sys.executable)


def test_a_dead_clusters_proxy_is_ended_and_a_living_ones_is_left() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, living = (Path(f"/tmp/outray-{pid}-test") for pid in (ended.pid, os.getpid()))
    orphan, proxy = start(dead), start(living)
    try:
        end_leftovers()
        assert orphan.wait(timeout=20) < 0
        assert not dead.exists()
        assert proxy.poll() is None
        assert living.exists()
    finally:
        for process in (orphan, proxy):
            process.kill()
            process.wait()
        shutil.rmtree(living, ignore_errors=True)

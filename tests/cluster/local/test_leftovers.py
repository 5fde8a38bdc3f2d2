"""Processes of a cluster whose own process was killed are ended by the next cluster that starts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from cluster.local.local_cluster import end_leftovers, own

SLEEP = "import time; time.sleep(60)"


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start what looks like the HAProxy of a cluster with this folder."""
    return subprocess.Popen(["haproxy", "-c", SLEEP, "-f", f"{folder}/haproxy.cfg"], executable=sys.executable)


def test_a_dead_clusters_proxy_is_ended_and_a_living_ones_is_left() -> None:
    dead, living = (Path(tempfile.mkdtemp(prefix="outray-", dir="/tmp")) for _ in range(2))
    own(dead).close()  # as the end of its process would
    owner = own(living)
    orphan, proxy = start(dead), start(living)
    try:
        end_leftovers()
        assert orphan.wait(timeout=20) < 0
        assert not dead.exists()
        assert proxy.poll() is None
        assert living.exists()
    finally:
        owner.close()
        for process in (orphan, proxy):
            process.kill()
            process.wait()
        end_leftovers()
    assert not living.exists()


def test_a_folder_that_a_dying_process_made_again_is_removed_and_a_new_one_is_left() -> None:
    again, new = (Path(tempfile.mkdtemp(prefix="outray-", dir="/tmp")) for _ in range(2))
    (again / "node").mkdir()
    (again / "node" / "haproxy.cfg").touch()
    try:
        end_leftovers()
        assert not again.exists()
        assert new.exists()
    finally:
        new.rmdir()


def test_a_link_to_nowhere_among_the_folders_stops_no_start() -> None:
    """Every user may make such a name in /tmp, and a folder may leave while it is looked at."""
    name = Path(tempfile.mktemp(prefix="outray-", dir="/tmp"))
    name.symlink_to("/nonexistent")
    try:
        end_leftovers()
        assert name.is_symlink()
    finally:
        name.unlink()

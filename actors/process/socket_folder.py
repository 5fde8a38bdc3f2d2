"""The folder of a pair's sockets."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "outrider-"


def private_folder() -> Path:
    """Make a folder with mode 0700, named after this process; short, since a socket's path may have 107 bytes.

    Folders of processes that are gone are removed on the way: a killed process could not do it.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        if not _is_alive(folder.name.split("-")[1]):
            shutil.rmtree(folder, ignore_errors=True)  # a folder of another user stays
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def _is_alive(pid: str) -> bool:
    return not pid.isdigit() or Path("/proc", pid).exists()

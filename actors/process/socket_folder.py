"""The folder of a pair's sockets."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "outrider-sockets-"
_LOCK = "lock"
_MOST_BYTES, _SHORT = 48, Path("/tmp")  # of TMPDIR: the rest of a socket's path has 59 bytes at most
_locks: list[int] = []  # open for as long as this process lives


def private_folder() -> Path:
    """Make a folder with mode 0700, short, since a socket's path may have 107 bytes.

    Folders of processes that are gone are removed on the way: a killed process could not do it. A lock tells, which
    ends with its process; ids of processes mean nothing where containers share the folder for temporary files.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > _MOST_BYTES:
        parent = _SHORT
    for folder in parent.glob(f"{_PREFIX}*"):
        if _is_left(folder):
            shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "new").rename(folder / _LOCK)  # a folder without a lock is one that is being made
    _locks.append(lock)
    return folder


def _is_left(folder: Path) -> bool:
    """True if the lock of a folder is there and free; not for one of another user."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True

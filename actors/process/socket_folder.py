"""The folder of a pair's sockets."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "outrider-sockets-"
_LOCK = "lock"
_MOST_BYTES, _SHORT = 48, Path("/tmp")  # of TMPDIR: the rest of a socket's path takes up to 59 bytes
_locks: list[int] = []  # open for as long as this process lives


def private_folder() -> Path:
    """Make a folder with mode 0700 and a short name, since a socket's path may have 107 bytes.

    It also removes folders of dead processes, since a killed process cannot. A process holds a lock on its folder until
    it ends; process ids would mean nothing where containers share the temporary folder.
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
    (folder / "new").rename(folder / _LOCK)  # a folder without a lock is still being made
    _locks.append(lock)
    return folder


def _is_left(folder: Path) -> bool:
    """True if the folder's lock exists and is free. False for another user's folder."""
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

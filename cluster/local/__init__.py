"""A cluster, or one process, on this machine, whose files other users cannot read: logs, sockets, clients' texts."""

from __future__ import annotations

import logging
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from protos.errors import ConfigError

logger = logging.getLogger(__name__)

PRIVATE = 0o077  # umask: files of mode 0600, folders of 0700
_ROOT = Path("/tmp")  # short, whatever TMPDIR is: a socket's path has 107 bytes, and Ray takes 66 of them


@contextmanager
def private_files() -> Iterator[None]:
    """Let no other user read files that this process, and children that it starts, make inside this block."""
    before = os.umask(PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


def private_root() -> str:
    """Return this user's folder for Ray's sessions, of mode 0700; create it if it is missing.

    Ray gives its own folders mode 0777. If another user has taken the name, this is a fresh folder of another name.
    """
    folder = _ROOT / f"outrider-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            folder.chmod(0o700)
            return str(folder)
    except OSError:
        pass
    logger.warning("%s is another user's; sessions of Ray go into a new folder", folder)
    return mkdtemp(prefix=f"{folder.name}-", dir=_ROOT)


def is_private(folder: Path) -> bool:
    """True if this folder, or one of its parents, is open to one user only."""
    return any(not each.stat().st_mode & PRIVATE for each in (folder, *folder.parents))


def check_file_limit() -> None:
    """Let this process and its children open as many files as the system allows.

    Raises:
        ConfigError: they are too few for HAProxy and Ray's processes.
    """
    needed = 16_384  # HAProxy wants 8,209 at its start, and each of Ray's processes some hundreds
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < needed:
        raise ConfigError(
            f"a process may open {most} files here, and HAProxy and Ray's processes need {needed}; raise the hard "
            "limit (ulimit -Hn, or LimitNOFILE of a service), or use --no-ray"
        )

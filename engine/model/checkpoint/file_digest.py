"""Digest of a weight file's bytes. Each file is read once per machine."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_DIGITS = 64
_LARGE_BYTES = 64 << 20  # smaller files are read faster than a stored digest pays off


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal digits.

    The Hub's cache names a file by its digest. For other large files the digest is cached in the user's cache, keyed
    by file attributes that change with the contents.
    """
    real = file.resolve()
    if real.parent.name == "blobs" and len(real.name) == _DIGITS:
        return real.name
    stat = real.stat()
    if stat.st_size < _LARGE_BYTES:
        return _read(real)
    identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    note = cache_root() / "digests" / "-".join(map(str, identity))
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with note.open("a+", encoding="ascii") as text:
            fcntl.flock(text, fcntl.LOCK_EX)  # one process of a pair reads the file, the others wait for it
            text.seek(0)
            if len(digest := text.read()) != _DIGITS:
                digest = _read(real)
                text.truncate(0)
                text.write(digest)
            return digest
    except OSError as error:
        logger.warning("cannot cache the digest of %s; the file is read again at the next start: %s", file, error)
        return _read(real)


def cache_root() -> Path:
    """Return the folder of all that is kept on disk; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outrider"


def _read(file: Path) -> str:
    began_s = time.monotonic()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    logger.debug("read %s for its digest in %.1f s", file, time.monotonic() - began_s)
    return digest

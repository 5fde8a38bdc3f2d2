"""Connections between threads of a pair's processes: frames (`protos.frames`) over Unix sockets.

The processes of a pair share a node, and a folder that only they may enter (`private_folder`), so they need no other
network. A round trip takes 39 us, against 0.9 ms for an actor call. `shell_messages` and `draft_link` define the
messages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from protos.frames import ConnectionLostError, FrameCodec

RECEIVE_BYTES = 1 << 18
POLL_S = 0.5  # of a process that serves its peer and watches for its end
SEND_TIMEOUT_S = 5.0  # for a peer that has stopped reading
_PREFIX = "outrider-sockets-"
_LOCK = "lock"
_locks: list[int] = []  # open for as long as this process lives

Incoming = TypeVar("Incoming")


class FrameConnection(Generic[Incoming]):
    """A connected socket. One thread may receive while others send. No call waits longer than its time-out."""

    def __init__(self, peer: socket.socket, incoming: Any) -> None:
        peer.setblocking(False)
        self._socket = peer
        self._codec: FrameCodec[Incoming] = FrameCodec(incoming)
        self._send_lock = threading.Lock()
        self._readable = _poll(peer, select.POLLIN)
        self._writable = _poll(peer, select.POLLOUT)

    def send(self, message: msgspec.Struct, timeout_s: float) -> None:
        """Send one whole frame.

        Raises:
            ConnectionLostError: the peer is gone, or its buffer stayed full for `timeout_s`. A frame may be incomplete,
                so close the connection.
        """
        data = memoryview(self._codec.encode(message))
        deadline_s = time.monotonic() + timeout_s
        with self._send_lock:
            while data:
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    if not self._writable.poll(_milliseconds(deadline_s)):
                        raise ConnectionLostError(f"the peer did not read for {timeout_s} s") from None
                except OSError as error:
                    raise ConnectionLostError(f"the peer is gone: {error}") from error

    def receive(self, timeout_s: float) -> list[Incoming]:
        """Return the messages that have arrived, waiting up to `timeout_s` for the first bytes; may be empty.

        Raises:
            ConnectionLostError: the peer is gone or broke the protocol.
        """
        if timeout_s > 0 and not self._readable.poll(_milliseconds(time.monotonic() + timeout_s)):
            return []
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionLostError(f"the peer is gone: {error}") from error
        if not data:
            raise ConnectionLostError("the peer closed the connection")
        return self._codec.feed(data)

    def has_arrived(self) -> bool:
        """True if `receive` would find data or the end of the connection. Does not wait."""
        return bool(self._readable.poll(0))

    def close(self) -> None:
        """Close the socket. A thread inside `receive` gets `ConnectionLostError`. Closing twice is fine."""
        with contextlib.suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class FrameListener:
    """The listening end of one Unix socket. A restarted process takes over its predecessor's path."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.fspath(path))
        self._socket.listen(1)
        self._readable = _poll(self._socket, select.POLLIN)

    def accept(self, incoming: Any, timeout_s: float) -> FrameConnection[Any] | None:
        """Return a connection to the next peer, or None after `timeout_s`."""
        if not self._readable.poll(_milliseconds(time.monotonic() + timeout_s)):
            return None
        peer, _ = self._socket.accept()
        return FrameConnection(peer, incoming)

    def close(self) -> None:
        self._socket.close()


def connect(path: Path, incoming: Any) -> FrameConnection[Any] | None:
    """Connect to a path without waiting. Return None if no process listens there."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.setblocking(False)
    try:
        peer.connect(os.fspath(path))
    except OSError:
        peer.close()
        return None
    return FrameConnection(peer, incoming)


def _poll(peer: socket.socket, events: int) -> select.poll:
    poll = select.poll()
    poll.register(peer, events)
    return poll


def _milliseconds(deadline_s: float) -> float:
    return max(0.0, (deadline_s - time.monotonic()) * 1000)


def private_folder() -> Path:
    """Make a folder with mode 0700 and a short name, since a socket's path may have 107 bytes.

    It also removes folders of dead processes, since a killed process cannot. A process holds a lock on its folder until
    it ends; process ids would mean nothing where containers share the temporary folder.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > 48:  # the rest of a socket's path takes up to 59 bytes of 107
        parent = Path("/tmp")
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

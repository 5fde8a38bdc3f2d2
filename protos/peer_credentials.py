"""The user of the process at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct


def is_own(peer: socket.socket) -> bool:
    """True if the process at the other end of a connected Unix socket belongs to our user."""
    _, user_id, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user_id == os.getuid())

"""Restart HAProxy at once when it dies, and run the substitute until Serve has started its own.

haproxy.sh runs this program with HAProxy's configuration, its process id and the command that starts another. It
imports only the standard library. It keeps HAProxy's listening sockets open, so no client is refused: connections wait
until the next HAProxy, ours or Serve's, takes the sockets over. Serve notices at its admin socket, within seconds,
that its HAProxy is gone; so ours has another one. Ours drains once Serve's has routes. When the cluster ends, so does
HAProxy.

With the configuration as its only argument, the program prints the Unix socket that hands over the listening sockets,
if a substitute runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

_TIMEOUT_S = 2.0
_MAX_SENT = 253  # descriptors in one message, by Linux
_WAITS_FOR_ROUTES = re.compile(rb"^description: waits for routes", re.MULTILINE | re.IGNORECASE)


def main() -> None:
    """Wait until HAProxy has died, then run a substitute; or print the running substitute's socket."""
    configuration = Path(sys.argv[1])
    found = re.search(r"stats socket (\S+)", configuration.read_text(encoding="utf-8"))
    if found is None:
        return
    if len(sys.argv) > 2:
        _watch(configuration, found[1], int(sys.argv[2]), sys.argv[3:])
    elif _is_answered(listeners_socket(found[1])):
        sys.stdout.write(listeners_socket(found[1]))


def _watch(configuration: Path, admin_socket: str, haproxy: int, command: list[str]) -> None:
    os.setsid()  # Ray kills a manager's whole process group
    cluster = _parent(_parent(haproxy))  # the raylet: HAProxy is its manager's child
    has_routes = _serves_routes(admin_socket, haproxy)
    listeners = _listeners(admin_socket) if has_routes else []
    _wait_for_end(haproxy, cluster)
    if has_routes and not answering(admin_socket)[0] and configuration.exists() and _parent(cluster):
        _hand_over(listeners, listeners_socket(admin_socket))
        _stand_in(command, configuration, admin_socket, cluster)


def _serves_routes(admin_socket: str, haproxy: int) -> bool:
    """Wait until HAProxy answers; return False if it has no route then, or ends before that."""
    while os.getppid() == haproxy:
        pid, has_routes = answering(admin_socket)
        if pid == haproxy:
            return has_routes
        time.sleep(0.1)
    return False


def _listeners(admin_socket: str) -> list[socket.socket]:
    """Return HAProxy's listening sockets, which it hands to its successor (-x)."""
    descriptors: list[int] = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(admin_socket)
            connection.sendall(b"_getsocks\n")
            # HAProxy sends the number of sockets, then their descriptors in parts, each acknowledged by the sum so far.
            (number,) = struct.unpack("i", connection.recv(4, socket.MSG_WAITALL))
            while len(descriptors) < number:
                text, received, _, _ = socket.recv_fds(connection, 1 << 16, _MAX_SENT)
                if not text:
                    break
                descriptors += received
                connection.sendall(struct.pack("i", len(descriptors)))
        except (OSError, struct.error):
            pass  # without the sockets, clients are refused until the next HAProxy listens
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for each in sockets:
        if each.family == socket.AF_UNIX:
            each.close()  # the admin socket: left open, it would look like a HAProxy that hangs
    return [each for each in sockets if each.fileno() >= 0]


def _hand_over(listeners: list[socket.socket], path: str) -> None:
    """Listen at a Unix socket, and give the listening sockets to each HAProxy that connects to it (-x)."""
    Path(path).unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    threading.Thread(target=_answer_all, args=(server, listeners), daemon=True).start()


def _answer_all(server: socket.socket, listeners: list[socket.socket]) -> None:
    descriptors = [each.fileno() for each in listeners][:_MAX_SENT]
    while True:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_TIMEOUT_S)
            if not connection.recv(64).startswith(b"_getsocks"):
                continue
            connection.sendall(struct.pack("i", len(descriptors)))
            # For each socket: its namespace, its interface (empty) and four unused bytes.
            socket.send_fds(connection, [bytes(6 * len(descriptors))], descriptors)
            connection.recv(4)


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        return connection.connect_ex(path) == 0


def _wait_for_end(haproxy: int, cluster: int) -> None:
    """Wait until HAProxy has ended; end it if its cluster ends first: it would hold the ports for ever."""
    try:
        process = os.pidfd_open(haproxy)
    except ProcessLookupError:
        return
    watched = [process]
    with contextlib.suppress(OSError):  # the cluster has ended, or is in another container
        watched.append(os.pidfd_open(cluster))
    ended, _, _ = select.select(watched, [], [])
    if process not in ended:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        select.select([process], [], [])


def _stand_in(command: list[str], configuration: Path, admin_socket: str, cluster: int) -> None:
    """Run HAProxy, and restart it if it dies, until Serve's has taken over; then let it drain. End with the cluster."""
    command = [*_with_own_socket(command, configuration, admin_socket), "-x", listeners_socket(admin_socket)]
    own, began_s = _started(command), time.monotonic()
    longest_s = 60.0  # Serve starts its own sooner, even on a busy machine; if it has not, it has been shut down
    deadline_s = began_s + longest_s
    while _parent(cluster):
        time.sleep(0.1)
        now_s, (pid, has_routes) = time.monotonic(), answering(admin_socket)
        if has_routes or now_s > deadline_s:
            own.send_signal(signal.SIGUSR1)
            own.wait()  # its configuration bounds how long it drains
            return
        if pid:
            deadline_s = now_s + longest_s
        if own.poll() is not None and now_s > began_s + 1.0:  # at most one start a second if it cannot run at all
            if not configuration.exists():
                return
            own, began_s = _started(command), now_s
    own.kill()


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, "OUTRIDER_STANDS_IN": "1"}, stdin=subprocess.DEVNULL)


def _with_own_socket(command: list[str], configuration: Path, admin_socket: str) -> list[str]:
    """Return the command with another admin socket, so that Serve does not take our HAProxy for its own."""
    own = configuration.with_name(f"standby-{configuration.name}")
    text = configuration.read_text(encoding="utf-8")
    own.write_text(text.replace(f"stats socket {admin_socket} ", f"stats socket {own_socket(admin_socket)} "))
    return [str(own) if word == str(configuration) else word for word in command]


def own_socket(admin_socket: str) -> str:
    """Return the path of the substitute's admin socket. It is short, since socket paths are limited."""
    return f"{admin_socket}2"


def listeners_socket(admin_socket: str) -> str:
    """Return the path of the Unix socket where the next HAProxy gets the listening sockets."""
    return f"{admin_socket}3"


def answering(admin_socket: str) -> tuple[int, bool]:
    """Return the process id of the HAProxy that has an admin socket, 0 without one, and whether it has any route."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(admin_socket)
            connection.sendall(b"show info\n")
            text = b""
            while part := connection.recv(4096):
                text += part
    except OSError:
        return 0, False
    found = re.search(rb"^Pid: (\d+)", text, re.MULTILINE)
    return (int(found[1]), _WAITS_FOR_ROUTES.search(text) is None) if found else (0, False)


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)


if __name__ == "__main__":
    main()

"""Starts HAProxy again at once where it has died unasked, until Serve has started one of its own.

Run as a program by haproxy.sh, with HAProxy's process id and the command that starts another; it imports nothing but
the standard library. Serve needs seconds to see that its HAProxy or the manager of it is gone, by the admin socket; so
ours has another one. The one that Serve starts then takes the ports, and ours drains.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TAKEOVER_S = 60.0  # for Serve to start its own, on a busy machine too; without one it has been shut down
_RESTART_S = 1.0  # between two of ours, should it not run at all
_PERIOD_S = 0.1
_TIMEOUT_S = 2.0


def main() -> None:
    """Wait until HAProxy has died, and stand in for it."""
    os.setsid()  # Ray kills a manager's group with it
    haproxy, command = int(sys.argv[1]), sys.argv[2:]
    configuration = Path(command[command.index("-f") + 1])
    cluster = _parent(_parent(haproxy))  # the raylet: HAProxy is its manager's child
    found = re.search(r"stats socket (\S+)", configuration.read_text(encoding="utf-8"))
    if found is not None and _has_begun(found[1], haproxy):
        _wait_for_end(haproxy)
        if _answering(found[1]) is None and configuration.exists() and _parent(cluster):
            _stand_in(command, configuration, found[1], cluster)


def _has_begun(admin_socket: str, haproxy: int) -> bool:
    """Wait until HAProxy answers; return False if it ends before that."""
    while _answering(admin_socket) != haproxy:
        if os.getppid() != haproxy:
            return False
        time.sleep(_PERIOD_S)
    return True


def _wait_for_end(haproxy: int) -> None:
    try:
        process = os.pidfd_open(haproxy)
    except ProcessLookupError:
        return
    select.select([process], [], [])


def _stand_in(command: list[str], configuration: Path, admin_socket: str, cluster: int) -> None:
    """Run HAProxy, another where it dies, until Serve's own has taken over; let it drain, or end with the cluster."""
    command = _with_own_socket(command, configuration, admin_socket)
    own, began_s = _started(command), time.monotonic()
    deadline_s = began_s + TAKEOVER_S
    while time.monotonic() < deadline_s and _parent(cluster):
        time.sleep(_PERIOD_S)
        if own.poll() is not None and time.monotonic() > began_s + _RESTART_S:
            if not configuration.exists():
                return
            own, began_s = _started(command), time.monotonic()
        if _answering(admin_socket) is not None:
            own.send_signal(signal.SIGUSR1)
            own.wait()  # its configuration bounds how long it drains
            return
    own.kill()


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, "OUTRIDER_STANDS_IN": "1"}, stdin=subprocess.DEVNULL)


def _with_own_socket(command: list[str], configuration: Path, admin_socket: str) -> list[str]:
    """Return the command for a configuration with another admin socket: Serve takes an answer there for its own's."""
    own = configuration.with_name(f"standby-{configuration.name}")
    text = configuration.read_text(encoding="utf-8")
    own.write_text(text.replace(f"stats socket {admin_socket} ", f"stats socket {own_socket(admin_socket)} "))
    return [str(own) if word == str(configuration) else word for word in command]


def own_socket(admin_socket: str) -> str:
    """Return the path of the stand-in's admin socket; a socket's path may not be much longer than the one it has."""
    return f"{admin_socket}2"


def _answering(admin_socket: str) -> int | None:
    """Return the process id of the HAProxy that answers; None without one."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(admin_socket)
            connection.sendall(b"show info\n")
            answer = b""
            while part := connection.recv(4096):
                answer += part
    except OSError:
        return None
    found = re.search(rb"^Pid: (\d+)", answer, re.MULTILINE)
    return int(found[1]) if found else None


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)


if __name__ == "__main__":
    main()

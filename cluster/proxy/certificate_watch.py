"""Give HAProxy changed certificates, so that it serves them without a restart.

haproxy.sh runs this program with HAProxy's configuration and process id. It imports only the standard library. It is a
child of HAProxy and ends with it. If HAProxy refuses a file, it keeps the previous one.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_KINDS = {"crt": "cert", "ca-file": "ca-file"}  # in the configuration, and in commands


def main() -> None:
    """Watch until HAProxy ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    haproxy = int(sys.argv[2])  # of the shell that has started this program and becomes HAProxy
    configuration = Path(sys.argv[1]).read_text(encoding="utf-8")
    found = re.search(r"stats socket (\S+)", configuration)
    names = {(kind, name) for kind, name in re.findall(r" (crt|ca-file) (\S+)", configuration)}
    # The contents that HAProxy was last given. Each file is given once at first: it may have changed between HAProxy's
    # reading and ours.
    given = dict.fromkeys(sorted(names), b"")
    while found and given and os.getppid() == haproxy:
        time.sleep(2.0)
        for (kind, name), last in given.items():
            contents = _contents(name)
            if contents.strip() and contents != last and _replace(found[1], _KINDS[kind], name, contents):
                given[kind, name] = contents


def _contents(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError:
        return b""  # it is being replaced


def _replace(admin_socket: str, kind: str, name: str, contents: bytes) -> bool:
    """Give HAProxy the new contents and log its answer; return False without one: the next round tries again."""
    lines = b"\n".join(line for line in contents.splitlines() if line.strip())  # an empty line would end them
    try:
        answers = [
            _ask(admin_socket, b"set ssl %s %s <<\n%s\n\n" % (kind.encode(), name.encode(), lines)),
            _ask(admin_socket, b"commit ssl %s %s\n" % (kind.encode(), name.encode())),
        ]
    except OSError as error:
        logger.warning("%s has changed, and HAProxy cannot be reached: %s", name, error)
        return False
    logger.info("%s is given; HAProxy: %s", name, " ".join(" ".join(answers).split()))
    return True


def _ask(admin_socket: str, command: bytes) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10.0)
        connection.connect(admin_socket)
        connection.sendall(command)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(4096):
            answer += part
        return answer.decode(errors="replace")


if __name__ == "__main__":
    main()

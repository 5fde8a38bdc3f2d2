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
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_KINDS = {"crt": "cert", "ca-file": "ca-file"}  # in the configuration, and in commands


@dataclass(slots=True)
class WatchedFile:
    """A file of HAProxy, by HAProxy's name for it, and the contents that it was last given."""

    kind: str
    name: str
    contents: bytes = b""

    def news(self) -> bytes | None:
        """Return new contents; None if they are unchanged or the file is missing (it is being replaced)."""
        try:
            contents = Path(self.name).read_bytes()
        except OSError:
            return None
        return contents if contents.strip() and contents != self.contents else None


def main() -> None:
    """Watch until HAProxy ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    haproxy = int(sys.argv[2])  # of the shell that has started this program and becomes HAProxy
    configuration = Path(sys.argv[1]).read_text(encoding="utf-8")
    found = re.search(r"stats socket (\S+)", configuration)
    names = {(kind, name) for kind, name in re.findall(r" (crt|ca-file) (\S+)", configuration)}
    # Give each file once at first: it may have changed between HAProxy's reading and ours.
    files = [WatchedFile(_KINDS[kind], name) for kind, name in sorted(names)]
    while found and files and os.getppid() == haproxy:
        time.sleep(2.0)
        for file in files:
            if (contents := file.news()) is not None:
                _replace(found[1], file, contents)


def _replace(admin_socket: str, file: WatchedFile, contents: bytes) -> None:
    """Give HAProxy the new contents and log its answer; without an answer, the next round tries again."""
    lines = b"\n".join(line for line in contents.splitlines() if line.strip())  # an empty line would end them
    try:
        answers = [
            _ask(admin_socket, b"set ssl %s %s <<\n%s\n\n" % (file.kind.encode(), file.name.encode(), lines)),
            _ask(admin_socket, b"commit ssl %s %s\n" % (file.kind.encode(), file.name.encode())),
        ]
    except OSError as error:
        logger.warning("%s has changed, and HAProxy cannot be reached: %s", file.name, error)
        return
    file.contents = contents
    logger.info("%s is given; HAProxy: %s", file.name, " ".join(" ".join(answers).split()))


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

"""The free TCP ports of this machine."""

from __future__ import annotations

import errno
import random
import socket

from protos.errors import ConfigError

_OURS = range(20_000, 30_000)  # between the ports of Ray and those of Serve, which are fixed; systems give others away


def is_free(host: str, port: int) -> bool:
    """True if a server could listen there now. Raises ConfigError if the host is none of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"host {host!r} is no address of this machine ({error}); use 127.0.0.1, or 0.0.0.0 for all"
                ) from None
            return False
    return True


def free_port() -> int:
    """Return a port without a listener, outside the range that the system hands out by itself."""
    return next(port for port in random.sample(_OURS, len(_OURS)) if is_free("0.0.0.0", port))


def free_ports(count: int) -> range:
    """Return `count` ports in a row, all without a listener."""
    rows = [range(first, first + count) for first in _OURS[: len(_OURS) - count + 1 : count]]
    return next(row for row in random.sample(rows, len(rows)) if all(is_free("0.0.0.0", port) for port in row))

"""The free TCP ports of this machine."""

from __future__ import annotations

import errno
import random
import socket
from typing import Any

from protos.errors import ConfigError

_OURS = range(20_000, 30_000)  # between Ray's fixed ports and Serve's, below the ports that systems give away


def is_free(host: str, port: int) -> bool:
    """True if a server could listen there now.

    Raises:
        ConfigError: the host is not an address of this machine, or this user may not listen at such a port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return all(_is_free(family, address) for family, _, _, _, address in found)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise ConfigError(
                f"host {host!r} is no address of this machine ({error}); use 127.0.0.1, or 0.0.0.0 for all"
            ) from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} is kept for root ({error}); use one from 1024 on") from None
        raise


def _is_free(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def refuse_ipv6(host: str) -> None:
    """Raise ConfigError for an IPv6 address: HAProxy reaches the replicas over IPv4 only."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    if all(family == socket.AF_INET6 for family, *_ in found):
        raise ConfigError(
            f"host {host!r} is an IPv6 address, and HAProxy reaches Ray Serve's replicas over IPv4 only; use an IPv4 "
            "address (127.0.0.1, or 0.0.0.0 for all), or --no-ray"
        )


def free_port() -> int:
    """Return a port without a listener, outside the system's ephemeral range."""
    return next(port for port in random.sample(_OURS, len(_OURS)) if is_free("0.0.0.0", port))


def free_ports(count: int) -> range:
    """Return `count` ports in a row, all without a listener."""
    rows = [range(first, first + count) for first in _OURS[: len(_OURS) - count + 1 : count]]
    return next(row for row in random.sample(rows, len(rows)) if all(is_free("0.0.0.0", port) for port in row))

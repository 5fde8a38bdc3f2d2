"""A port is checked at the address where a server would listen."""

from __future__ import annotations

import errno
import socket

import pytest

from cluster.local.serve_environment import free_port, is_free, refuse_ipv6
from protos.errors import ConfigError


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "::"])
def test_a_port_is_free_until_somebody_listens(host: str):
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    assert is_free(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, port))
        listener.listen()
        assert not is_free(host, port)


@pytest.mark.parametrize("host", ["192.0.2.99", "2001:db8::1", "no.such.host.invalid", "two..dots"])
def test_an_address_of_another_machine_is_refused(host: str):
    with pytest.raises(ConfigError, match="is no address of this machine"):
        is_free(host, free_port())


def test_a_port_of_root_is_not_called_taken(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError, match=r"port 80 is kept for root .*; use one from 1024 on"):
        is_free("127.0.0.1", 80)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_an_address_that_haproxy_would_answer_503_at_is_refused(host: str):
    with pytest.raises(ConfigError, match=r"use an IPv4 address .* or --no-ray"):
        refuse_ipv6(host)
    for usual in ("127.0.0.1", "0.0.0.0", "localhost"):
        refuse_ipv6(usual)

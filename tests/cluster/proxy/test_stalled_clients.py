"""Clients that stall, at any moment of a request and by any method, do not keep their places."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from cluster.proxy import haproxy_config
from cluster.proxy.haproxy_config import ProxySettings
from tests.cluster.proxy.test_haproxy_config import Proxy, connect_unless_reset, is_open, start, status_of, wait_for

__all__ = ["start"]  # the fixture

REQUEST_TIMEOUT_S, CLIENT_TIMEOUT_S = 1, 2
BOUND_S = REQUEST_TIMEOUT_S + CLIENT_TIMEOUT_S + 3.0  # the last for a busy machine
KEY = b"Authorization: Bearer a\r\n"
LONG = b"X-A: %s\r\nX-B: %s\r\n" % (b"a" * 7000, b"b" * 7300)  # of HAProxy's 15 KiB
PART = b"a" * 20_480
# HTTP/2: the preface with empty settings; the headers of a POST to "/" as stream 1; a ping.
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0" + b"\0\0\6\1\4\0\0\0\1\x83\x86\x84\x41\1x"
PING = b"\0\0\x08\6\0\0\0\0\0" + bytes(8)
Send = Callable[[dict[str, Any]], Awaitable[None]]


def head(method: bytes, path: bytes, length: int, headers: bytes = b"") -> bytes:
    return b"%s %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n" % (method, path, headers, length)


def chunked(method: bytes, headers: bytes = b"") -> bytes:
    return b"%s /v1/completions HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n" % (method, headers)


COMPLETIONS = b"/v1/completions"
MIB_8 = 8 << 20
STALLED = {  # sent at once, and then every 0.3 s
    "nothing": (b"", b""),
    "half a header": (b"POST / HT", b""),
    "a header, bit by bit": (b"POST /", b"a"),
    "POST without a byte": (head(b"POST", COMPLETIONS, 900), b""),
    "POST, bit by bit": (head(b"POST", COMPLETIONS, 9000), b"a"),
    "POST that waits for 100": (head(b"POST", COMPLETIONS, MIB_8, b"Expect: 100-continue\r\n"), b""),
    "POST without a key, 20 KiB": (head(b"POST", COMPLETIONS, MIB_8) + PART, b""),
    "POST without a key, 20 KiB, bit by bit": (head(b"POST", COMPLETIONS, MIB_8) + PART, b"a"),
    "POST without a key, long headers": (head(b"POST", COMPLETIONS, 8000, LONG), b"a"),
    "POST without a key, chunks": (chunked(b"POST") + b"5000\r\n" + PART + b"\r\n", b"1\r\na\r\n"),
    "POST with a key, 20 KiB": (head(b"POST", COMPLETIONS, MIB_8, KEY) + PART, b""),
    "POST with a key, chunks": (chunked(b"POST", KEY) + b"5000\r\n" + PART + b"\r\n", b""),
    "POST to a page of Serve": (head(b"POST", b"/-/routes", MIB_8) + PART, b"a"),
    "POST to upgrade": (head(b"POST", COMPLETIONS, MIB_8, b"Connection: Upgrade\r\nUpgrade: x\r\n") + PART, b"a"),
    "PUT without a byte": (head(b"PUT", COMPLETIONS, 900), b""),
    "PUT, bit by bit": (head(b"PUT", COMPLETIONS, 9000), b"a"),
    "PUT, chunks": (chunked(b"PUT"), b"1\r\na\r\n"),
    "PUT, 20 KiB": (head(b"PUT", COMPLETIONS, MIB_8) + PART, b"a"),
    "GET, bit by bit": (head(b"GET", b"/health", 9000), b"a"),
    "GET, 20 KiB": (head(b"GET", b"/health", MIB_8) + PART, b"a"),
    "GET, long headers": (head(b"GET", b"/health", 8000, LONG), b"a"),
    "HEAD, 20 KiB": (head(b"HEAD", b"/health", MIB_8) + PART, b"a"),
    "HTTP/2": (HTTP_2, b""),
    "HTTP/2 with pings": (HTTP_2, PING),
    "HTTP/2, 16 KiB": (HTTP_2 + b"\0\x40\0\0\0\0\0\0\1" + PART[:16384], PING),
    "a second request": (head(b"GET", b"/health", 0) + head(b"POST", COMPLETIONS, MIB_8) + PART, b"a"),
}


async def ingress(scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Send) -> None:
    """Refuse without a key before the body is read, as ours does; answer the others slowly."""
    if scope["type"] != "http":
        return
    headers = dict(scope["headers"])
    if scope["method"] != "POST":
        await answer(send, 200)
    elif b"authorization" not in headers:
        await answer(send, 401)
    else:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(float(headers.get(b"x-wait-s", b"0")))
        await answer(send, 200)


async def answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def proxy(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """HAProxy before an ingress, with short time-outs."""
    monkeypatch.setattr(haproxy_config, "CLIENT_TIMEOUT_S", CLIENT_TIMEOUT_S)
    yield from serve(start)


def serve(start: Callable[..., Proxy], settings: ProxySettings = ProxySettings()) -> Iterator[Proxy]:
    proxy = start(settings)
    server = uvicorn.Server(uvicorn.Config(ingress, port=proxy.server, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: status_of(proxy, "/health", "127.0.0.1") == 200)
    yield proxy
    server.should_exit = True
    thread.join(20)


async def held_s(port: int, first: bytes, drip: bytes) -> float:
    """Return how many seconds a connection stays open; infinite beyond the bound."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began_s = time.monotonic()
    writer.write(first)

    async def send() -> None:
        while drip:
            await asyncio.sleep(0.3)
            writer.write(drip)

    dripping = asyncio.create_task(send())
    try:
        async with asyncio.timeout(BOUND_S):
            with suppress(ConnectionError):
                while await reader.read(65536):
                    pass
        return time.monotonic() - began_s
    except TimeoutError:
        return float("inf")
    finally:
        dripping.cancel()
        writer.close()


async def test_no_stalled_connection_stays(proxy: Proxy) -> None:
    seconds = await asyncio.gather(*(held_s(proxy.http, *sent) for sent in STALLED.values()))
    assert [name for name, held in zip(STALLED, seconds, strict=True) if held > BOUND_S] == []


@pytest.mark.parametrize("num_bytes", [2, 100_000])
def test_a_client_may_wait_for_its_answer_longer_than_it_may_stall(proxy: Proxy, num_bytes: int) -> None:
    headers = {"Authorization": "Bearer a", "X-Wait-S": str(CLIENT_TIMEOUT_S + 2)}
    url = f"http://127.0.0.1:{proxy.http}/v1/completions"
    assert httpx.post(url, content=b"a" * num_bytes, headers=headers, timeout=20).status_code == 200


def test_whole_bodies_of_any_method_and_early_refusals_arrive(proxy: Proxy) -> None:
    url = f"http://127.0.0.1:{proxy.http}"
    with httpx.Client(base_url=url, timeout=20) as client:
        assert client.request("GET", "/health", content=b"{}").status_code == 200
        assert client.put("/health", content=b"a" * 10_000).status_code == 200
        assert client.post("/v1/completions", content=b"a" * 1_000_000).status_code == 401
        refused = client.put("/health", content=b"a" * 100_000)
    assert refused.status_code == 413
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_few_addresses_leave_places_to_others(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three addresses with 1,024 connections each took all 3,072 places."""
    monkeypatch.setattr(haproxy_config, "MAX_HTTP_CONNECTIONS", 48)
    monkeypatch.setattr(haproxy_config, "REQUEST_TIMEOUT_S", 15)
    for proxy in serve(start, ProxySettings(max_connections_per_address=16)):
        kept = [connect_unless_reset(proxy.http, f"127.0.0.{2 + index % 3}") for index in range(60)]
        time.sleep(0.5)  # while one is being refused it counts
        assert status_of(proxy, "/health", "127.0.0.9") == 200
        num_open = sum(connection is not None and is_open(connection) for connection in kept)
        assert 20 <= num_open <= 26
        for connection in kept:
            if connection is not None:
                connection.close()


def test_no_idle_connection_is_kept_after_its_answer_in_a_crowd(
    start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy_config, "MAX_HTTP_CONNECTIONS", 8)
    monkeypatch.setattr(haproxy_config, "REQUEST_TIMEOUT_S", 15)
    for proxy in serve(start):
        for num_others, is_kept in ((0, True), (6, False)):
            others = [connect_unless_reset(proxy.http, f"127.0.0.{2 + index}") for index in range(num_others)]
            with closing(socket.create_connection(("127.0.0.1", proxy.http), 5, ("127.0.0.20", 0))) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert client.recv(1000).startswith(b"HTTP/1.1 200")
                time.sleep(0.3)
                assert is_open(client) is is_kept
            for other in others:
                if other is not None:
                    other.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_network_of_ipv6_counts_as_one_address(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has all 2^64 addresses of one, and would have a fresh limit with each."""
    monkeypatch.setattr(Proxy, "host", "::1")
    proxy = start()
    wait_for((proxy.folder / "admin.sock").exists)
    with socket.create_connection(("::1", proxy.http), 5):
        wait_for(lambda: known_addresses(proxy) == [b"::"])


def known_addresses(proxy: Proxy) -> list[bytes]:
    with closing(socket.socket(socket.AF_UNIX)) as admin:
        admin.connect(str(proxy.folder / "admin.sock"))
        admin.sendall(b"show table http_frontend\n")
        answer = b"".join(iter(lambda: admin.recv(4096), b""))
    return re.findall(rb"key=(\S+)", answer)

"""The HTTP server of `--no-ray`: upgrades are ignored, and nobody holds its places."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from cluster.local.http_server import Places
from cluster.local.serve_environment import free_port
from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.api_keys import ApiKeys
from router.client_limits import MAX_CONNECTIONS_PER_ADDRESS, MAX_HEAD_BYTES, REQUEST_TIMEOUT_S
from router.grpc_api.api import GrpcApi, connection_limits, start_grpc_server
from router.grpc_api.reading_gate import ReadingGate
from tests.cluster.local.fake_server import fake_service, serving
from tests.cluster.proxy.test_haproxy_config import make_certificate
from tests.router.fixtures.key_files import api_keys

BODY = json.dumps({"prompt": "abc", "max_tokens": 4}).encode()
JAVA = (  # of the JDK's HttpClient
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
HANDSHAKE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


def post(headers: str = "", body: bytes = BODY, *, path: str = "/v1/completions", is_chunked: bool = False) -> bytes:
    """Return a request in bytes."""
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n{headers}\r\n"
    parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:])] if is_chunked else [body]
    return head.encode() + b"".join([*parts, b"0\r\n\r\n" if is_chunked else b""])


async def send(port: int, *pieces: bytes, pause_s: float = 0.0, num_answers: int = 1) -> bytes:
    """Send the pieces, and return what comes until there are so many answers, or the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pause_s)
    answer = b""
    while answer.count(b"HTTP/1.1 ") < num_answers or not answer.endswith((b"}", b".\n")):
        part = await asyncio.wait_for(reader.read(1 << 16), 20.0)
        if not part:
            break
        answer += part
    writer.close()
    return answer


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving() as port:
        yield port


WEBSOCKET = post(HANDSHAKE)
UPGRADES = [
    post(JAVA),
    post(JAVA, is_chunked=True),
    post("Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    post("Connection: keep-alive, Upgrade\r\nUpgrade: TLS/1.2\r\n"),
    WEBSOCKET,
    post("Upgrade: h2c\r\n"),
    post("TE: trailers\r\n"),
    post().replace(b"POST /", b"POST http://localhost/"),
]


@pytest.mark.parametrize("request_", UPGRADES)
async def test_an_offered_upgrade_is_ignored_and_the_body_is_read(port: int, request_: bytes) -> None:
    answer = await send(port, request_)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(("method", "status"), [("PUT", 405), ("POST", 400)])
async def test_a_body_that_is_refused_by_its_head_is_not_asked_for(port: int, method: str, status: int) -> None:
    """A client that waits for 100 Continue sends nothing where the answer is known already."""
    head = f"{method} /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
    began_s = time.monotonic()
    answer = await send(port, f"{head}Expect: 100-continue\r\nContent-Length: 5000000\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert time.monotonic() - began_s < 0.9  # no wait for a body that nobody asked for
    assert (await send(port, post("Expect: 100-continue\r\n"), num_answers=2)).startswith(b"HTTP/1.1 100 Continue")


async def test_an_upgrade_is_ignored_wherever_the_request_is_cut(port: int) -> None:
    request = post(JAVA)
    for cut in range(1, len(request), 23):
        assert (await send(port, request[:cut], request[cut:], pause_s=0.005)).startswith(b"HTTP/1.1 200 OK"), cut


async def test_requests_that_follow_an_upgrade_in_one_piece_are_answered(port: int) -> None:
    answers = await send(port, post(JAVA) + post(JAVA, is_chunked=True) + post(), num_answers=3)
    assert answers.count(b"HTTP/1.1 200 OK") == 3


async def test_a_client_that_waits_for_100_gets_it_beside_an_upgrade(port: int) -> None:
    request = post(JAVA + "Expect: 100-continue\r\n")
    head, _, body = request.partition(b"\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 100 Continue\r\n"
    writer.write(body)
    assert await asyncio.wait_for(reader.readline(), 5) == b"\r\n"
    assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 200 OK\r\n"
    writer.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", b"400"),
        (b"CONNECT example.org:80 HTTP/1.1\r\nHost: example.org:80\r\n\r\n", b"405"),
        (post().replace(b"Content-Length", b"Transfer-Encoding: gzip\r\nX-Length"), b"400"),
        (b"GET / HTTP/1.1\r\n" + b"X-Long: %b\r\n" % (b"x" * 1000) * (MAX_HEAD_BYTES // 1000 + 300), b"431"),
        (post("X-Long: %s\r\n" % ("x" * MAX_HEAD_BYTES)), b"431"),
        (b"\x16\x03\x01" + b"\x00" * 500, b"400"),
    ],
)
async def test_other_protocols_are_closed_with_a_word(port: int, request_: bytes, status: bytes) -> None:
    answer = await send(port, request_)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("fields", [{"stream": True}, {}])
async def test_an_old_client_reads_an_answer_up_to_the_end_of_the_connection(port: int, fields: dict) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 4, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post("Connection: keep-alive\r\n", body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head, _, answer = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in head.lower()
    if not fields:
        assert json.loads(answer)["choices"][0]["text"] == "defg"
        return
    *events, end, rest = answer.decode().split("\n\n")
    assert "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events) == "defg"
    assert (end, rest) == ("data: [DONE]", "")


async def opened(port: int, request: bytes, address: str = "127.0.0.1") -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    reader.writer = writer  # type: ignore[attr-defined]  # else it would be closed
    writer.write(request)
    return reader


async def test_nobody_holds_a_place_without_sending() -> None:
    """Each client sends something, then nothing for good; with the limits as they are deployed."""
    big = b"x" * 20_000
    heads = {
        "nothing": b"",
        "half a head": b"GET /health HT",
        "headers": b"GET /health HTTP/1.1\r\nX-A: b\r\n",
        "a part of a body": post(body=BODY + b" " * 8_000_000)[:20_000],
        "a part of a chunked body": post(is_chunked=True, body=big)[:-3000],
        "a part of a body, for the wrong method": post(body=b" " * 8_000_000)[:900].replace(b"POST", b"PUT"),
        "a body with GET": b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx",
        "a part of a body, for no path": post(body=b" " * 8_000_000, path="/nothing")[:20_000],
    }
    async with serving() as port:
        clients = {name: await opened(port, request) for name, request in heads.items()}
        began_s = time.monotonic()
        await asyncio.wait_for(asyncio.gather(*(reader.read() for reader in clients.values())), 3 * REQUEST_TIMEOUT_S)
        assert time.monotonic() - began_s < 2 * REQUEST_TIMEOUT_S


@pytest.fixture
def timeout_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """A shorter time in place of `REQUEST_TIMEOUT_S`."""
    for place in ("cluster.local.http_server.REQUEST_TIMEOUT_S", "router.openai.http_body.BODY_GRACE_S"):
        monkeypatch.setattr(place, 3)
    return 3.0


async def test_a_body_that_drips_is_refused(port: int, timeout_s: float) -> None:
    """A byte a second stalls never and would last for a day; after the grace it is below the least pace."""
    reader = await opened(port, post(body=BODY + b" " * 80_000)[:-80_000])
    for pause_s in (1, 1, 0):  # for two seconds: a byte after the refusal would reset the connection
        reader.writer.write(b" ")  # type: ignore[attr-defined]
        await asyncio.sleep(pause_s)
    answer = await asyncio.wait_for(reader.read(), timeout_s + 5)
    assert answer.startswith(b"HTTP/1.1 408")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "timeout_error"
    waited = re.search(r"have come in (\d+) s", error["message"])
    assert waited is not None
    assert int(waited[1]) < timeout_s + 2, "a stall of three seconds after the last byte is refused later"
    assert b"connection: close" in answer.lower()


async def test_an_answer_without_a_key_closes_what_is_still_sent() -> None:
    async with serving(keys=api_keys("secret")) as port:
        reader = await opened(port, post(body=b" " * 8_000_000)[:20_000])
        began_s = time.monotonic()
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 401")
        assert b"connection: close" in answer.lower()
        assert time.monotonic() - began_s < 4
        whole = await send(port, post() + post(), num_answers=2)
        assert whole.count(b"HTTP/1.1 401") == 2, "a body that has come whole keeps its connection"


async def test_one_address_has_its_number_of_connections_and_others_have_theirs() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 3 * MAX_CONNECTIONS_PER_ADDRESS:
        pytest.skip(f"this process may open {most} files")
    async with serving() as port:
        readers = [await opened(port, b"", "127.0.0.2") for _ in range(MAX_CONNECTIONS_PER_ADDRESS + 20)]
        await asyncio.sleep(0.5)
        assert sum(reader.at_eof() or reader.exception() is not None for reader in readers) == 20
        assert (await send(port, post("Connection: close\r\n"))).startswith(b"HTTP/1.1 200 OK")
        for reader in readers:
            reader.writer.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        reader = await opened(port, post(), "127.0.0.2")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200")


def test_an_ipv6_network_is_one_address_and_operators_have_places_of_their_own() -> None:
    places = Places("127.0.0.1 10.0.0.0/8", max_of_address=2)
    leaves = [places.take(f"2001:db8::{index}") for index in range(3)]
    assert [leave is None for leave in leaves] == [False, False, True]
    assert places.take("2001:db8:0:1::1")
    assert leaves[0] is not None
    leaves[0]()
    leaves[0]()
    assert places.take("2001:db8::9")
    assert places.take("2001:db8::9") is None
    assert places.is_operator("::ffff:10.1.2.3")
    assert not places.is_operator("11.1.2.3")


def test_idle_connections_beyond_the_limit_of_files_stop_nobody(tmp_path: Path) -> None:
    """230 of them, of a process that may open 200 files, took 65% of a core and wrote 5 MB of log in a second."""
    port, log = free_port(), tmp_path / "log"
    command = f"ulimit -n 200; exec {sys.executable} -m tests.cluster.local.fake_server {port}"
    with log.open("wb") as file, subprocess.Popen(["bash", "-c", command], stdout=file, stderr=file) as process:
        try:
            wait_until_live(port, process)
            idle = [connect(port, f"127.0.0.{2 + index % 4}") for index in range(230)]
            began_s = psutil.Process(process.pid).cpu_times().user
            deadline_s = time.monotonic() + 3
            while time.monotonic() < deadline_s:
                assert httpx.get(f"http://127.0.0.1:{port}/live", timeout=3).status_code == 200
                time.sleep(0.3)
            assert psutil.Process(process.pid).cpu_times().user - began_s < 1
            assert log.stat().st_size < 10_000
            assert len(idle) == 230
        finally:
            process.kill()


def connect(port: int, address: str) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), 3, (address, 0))
    except OSError:
        return None


def wait_until_live(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/live", timeout=3).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"not live; it has ended with {process.poll()}")


async def test_tls_serves_and_may_ask_for_a_client_s_certificate(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with serving(tls=(str(certificate), None)) as port, httpx.AsyncClient(verify=trusting) as client:
        answer = await client.post(f"https://localhost:{port}/v1/completions", json=json.loads(BODY))
        assert answer.status_code == 200
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://localhost:{port}/live")
    async with serving(tls=(str(certificate), str(certificate))) as port:
        async with httpx.AsyncClient(verify=trusting) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"https://localhost:{port}/live")
        trusting.load_cert_chain(certificate)
        async with httpx.AsyncClient(verify=trusting) as client:
            assert (await client.get(f"https://localhost:{port}/live")).status_code == 200


async def test_a_tls_handshake_that_stands_still_loses_its_place(tmp_path: Path, timeout_s: float) -> None:
    certificate = make_certificate(tmp_path)
    async with serving(Places(max_of_address=2), (str(certificate), None)) as port:
        silent = [await opened(port, b"\x16\x03\x01"), await opened(port, b"no handshake at all\r\n\r\n")]
        await asyncio.wait_for(silent[1].read(), 5)
        await asyncio.wait_for(silent[0].read(), timeout_s + 5)
        trusting = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(verify=trusting) as client:
            for _ in range(2):
                assert (await client.get(f"https://localhost:{port}/live")).status_code == 200


async def test_grpc_has_tls_and_its_own_limits_of_connections(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    service, keys, port = fake_service(), ApiKeys(), free_port()
    server = await start_grpc_server(
        GrpcApi(service, keys),
        ReadingGate(keys, service.metrics.count_request),
        f"127.0.0.1:{port}",
        limits=connection_limits(2),
        tls=(str(certificate), str(certificate)),
    )
    pem = certificate.read_bytes()
    request = pb2.GenerateRequest(prompt="abc", max_tokens=4)
    try:
        async with grpc.aio.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(pem, pem, pem)) as channel:
            answer = await outrider_pb2_grpc.GenerationStub(channel).Generate(request, timeout=20)
            assert answer.choices[0].text == "defg"
            others = [await opened(port, b"") for _ in range(4)]
            ended = await asyncio.wait_for(asyncio.gather(*(each.read() for each in others[1:])), 10)
            assert ended == [b""] * 3
        async with grpc.aio.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(pem)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await outrider_pb2_grpc.GenerationStub(channel).Generate(request, timeout=3)
    finally:
        await server.stop(None)

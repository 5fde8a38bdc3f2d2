"""Clients that leave, stall, trickle or speak no right HTTP, on connections of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections import Counter

import httpx

from tests.serve.attacks.attack import BROKEN, STILL_OPEN, TIMEOUT_S, Answers, Face, attack, status_of

_STALL_S = 90.0  # longer than HAProxy lets any body stall
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


@attack("200 streams that are left after their first bytes")
async def _leavers(face: Face) -> Answers:
    async def leave() -> str:
        body = {"model": face.model, "prompt": "def f", "max_tokens": 400, "stream": True, "ignore_eos": True}
        try:
            async with (
                httpx.AsyncClient(base_url=face.url, timeout=TIMEOUT_S, verify=False) as client,  # 200 would load CAs
                client.stream("POST", "/v1/completions", json=body, headers=face.headers) as answer,
            ):
                async for _ in answer.aiter_raw():
                    break
                return status_of(answer)
        except httpx.HTTPError as error:
            return type(error).__name__

    return Counter(await asyncio.gather(*(leave() for _ in range(200))))


@attack("30 streams with logprobs that are not read")
async def _paused_readers(face: Face) -> Answers:
    body = {"model": face.model, "prompt": "x", "max_tokens": 900, "stream": True, "logprobs": 20, "ignore_eos": True}
    return await _raw(face, 30, _request("POST", "/v1/completions", json.dumps(body).encode()), hold_s=6.0)


@attack("300 clients that send a header's byte a second, 300 a body's, 300 nothing")
async def _slow_clients(face: Face) -> Answers:
    head = _request("POST", "/v1/completions", b" " * 900)[:-900]
    slow = (_raw(face, 300, head[:30], drip=b"a", hold_s=6.0), _raw(face, 300, head, drip=b" ", hold_s=6.0))
    return sum(await asyncio.gather(*slow, _raw(face, 300, b"", hold_s=6.0)), Counter())


@attack("1,000 bodies of POST, PUT and GET that stop or trickle after 20 KiB, or before, with a key and without one")
async def _stalled_bodies(face: Face) -> Answers:
    part, key = b"a" * 20_480, f"Authorization: Bearer {face.key}\r\n".encode()
    heads = [
        b"%s /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%sContent-Length: 8000000"
        b"\r\n\r\n" % (method, headers)
        for method, headers in ((b"POST", b""), (b"POST", key), (b"PUT", b""), (b"GET", b""))
    ]
    stalls = [(head + sent, drip) for head in heads for sent in (b"", part) for drip in (b"", b"a")]
    number = 1000 // len(stalls)
    return Counter(await asyncio.gather(*(_stall(face, *stall) for stall in stalls for _ in range(number))))


@attack("3,072 connections of three addresses, silent or with a PUT that stalls, and checks of two others meanwhile")
async def _lock_out(face: Face) -> Answers:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    put = _request("PUT", "/v1/completions", b" " * 900)[:-900]
    clients = [(f"127.0.0.{2 + rank % 3}", put if rank % 2 else b"") for rank in range(min(3072, most // 2))]
    held = [asyncio.create_task(_stall(face, request, b"", address)) for address, request in clients]
    answers: Answers = Counter()
    for wait_s in (3.0, 9.0):
        await asyncio.sleep(wait_s)
        for address in ("127.0.0.1", "127.0.0.9"):
            transport = httpx.AsyncHTTPTransport(local_address=address)
            async with httpx.AsyncClient(base_url=face.url, timeout=5.0, transport=transport) as client:
                try:
                    status = status_of(await client.get("/live"))
                except httpx.HTTPError as error:
                    status = type(error).__name__
            answers[f"check {status}" if status == "200" else f"{BROKEN}check {status}"] += 1
    return answers + Counter(await asyncio.gather(*held))


@attack("malformed HTTP, two lengths in one request, 100 kB of headers")
async def _strange_http(face: Face) -> Answers:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    both = head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /admin"
    headers = (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        + b"".join(b"X-%d: %s\r\n" % (i, b"v" * 100) for i in range(1000))
        + b"\r\n"
    )
    requests = [
        both,
        headers,
        b"\x16\x03\x01" + b"\x00" * 500,
        b"GET " + b"/a" * 50_000 + b" HTTP/1.1\r\n\r\n",
        b"\r\n" * 9999,
    ]
    return sum(await asyncio.gather(*(_raw(face, 5, request, hold_s=2.0) for request in requests)), Counter())


@attack("HTTP/2 on the HTTP port: its preface, and an upgrade to it, whose body is read")
async def _http_2(face: Face) -> Answers:
    body = json.dumps({"model": face.model, "prompt": "x", "max_tokens": 4}).encode()
    head, _, rest = _request("POST", "/v1/completions", body).partition(b"\r\n\r\n")
    upgrade = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    prefaces = Counter(await asyncio.gather(*(_stall(face, _PREFACE, b"") for _ in range(50))))
    upgraded = await _raw(face, 5, head + upgrade + rest, hold_s=4.0)
    return _only(prefaces, "400", "closed") + _only(upgraded, "200", "503")


def _only(answers: Answers, *right: str) -> Answers:
    return Counter({each if each in right else f"{BROKEN}{each}": number for each, number in answers.items()})


@attack("names of other hosts, as a web page sends them after DNS rebinding")
async def _foreign_hosts(face: Face) -> Answers:
    found: list[str] = []
    strange = ("evil.example", f"evil.example:{face.http_port}", "localhost.evil.example", "127.0.0.1.evil.example")
    async with httpx.AsyncClient(base_url=face.url, timeout=TIMEOUT_S, headers=face.headers) as client:
        for host in strange:
            headers, body = {"Host": host, "Origin": f"http://{host}"}, {"model": face.model, "prompt": "x"}
            found.append(status_of(await client.get("/v1/models", headers=headers)))
            for path in ("/v1/completions", "/admin/drafts", "/admin/drafts/swap"):
                found.append(status_of(await client.post(path, json=body, headers=headers)))
        ours = [
            status_of(await client.get("/v1/models", headers={"Host": host})) for host in ("localhost", "127.0.0.1")
        ]
        slash = await client.post("/v1/completions/", json=body)
    slashed = f"{BROKEN}redirect" if slash.has_redirect_location else f"slash {status_of(slash)}"
    return _only(Counter(found), "421") + _only(Counter(ours), "200") + Counter([slashed])


@attack("800 probes of /health and /metrics, 100 at once, without a key")
async def _probes(face: Face) -> Answers:
    async def probe(client: httpx.AsyncClient) -> Answers:
        return Counter([status_of(await client.get(path)) for path in ("/health", "/metrics") * 4])

    async with httpx.AsyncClient(base_url=face.url, timeout=TIMEOUT_S, limits=httpx.Limits()) as client:
        return sum(await asyncio.gather(*(probe(client) for _ in range(100))), Counter())


def _request(method: str, path: str, body: bytes) -> bytes:
    lines = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{method} {path} HTTP/1.1\r\n{lines}".encode() + b"\r\n\r\n" + body


async def _raw(face: Face, number: int, request: bytes, *, drip: bytes = b"", hold_s: float) -> Answers:
    """Open the connections, send the request, then one byte of `drip` per second; read only at the end."""
    return Counter(await asyncio.gather(*(_raw_one(face, request, drip, hold_s) for _ in range(number))))


async def _stall(face: Face, request: bytes, drip: bytes, address: str | None = None) -> str:
    """Wait until the server closes the connection; return the first answer's status, or `STILL_OPEN`.

    `address` is ours.
    """
    ours = None if address is None else (address, 0)
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(face.host, face.http_port, local_addr=ours), TIMEOUT_S
        )
    except OSError:
        return "refused"

    async def send() -> None:
        with contextlib.suppress(OSError):
            writer.write(request)
            while drip:
                await asyncio.sleep(1.0)
                writer.write(drip)

    sending = asyncio.create_task(send())
    answer = b""
    try:
        async with asyncio.timeout(_STALL_S):
            while part := await reader.read(1 << 16):
                answer = answer or part
    except TimeoutError:
        return STILL_OPEN
    except OSError:
        pass  # closed while our bytes were in flight
    finally:
        sending.cancel()
        writer.transport.abort()
    return answer[9:12].decode() or "closed"


async def _raw_one(face: Face, request: bytes, drip: bytes, hold_s: float) -> str:
    writer = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(face.host, face.http_port), TIMEOUT_S)
        writer.write(request)
        for _ in range(int(hold_s)):
            await asyncio.sleep(1.0)
            if drip:
                writer.write(drip)
        writer.write_eof()
        line = await asyncio.wait_for(reader.readline(), 5.0)
        words = line.split()
        return words[1].decode() if len(words) > 1 and words[0].startswith(b"HTTP") else "closed"
    except TimeoutError:
        return "open"
    except (OSError, ValueError):
        return "closed"
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

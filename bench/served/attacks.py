"""Short bursts of hostile and careless clients against a served application, and their answers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import resource
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from bench.served.half_call import first_part, half_calls
from protos import outrider_pb2 as pb2

_COMPAT = Path(__file__).parents[2] / "tests/compat/run.sh"
_TIMEOUT_S = 60.0
_STALL_S = 90.0  # longer than HAProxy lets any body stall
STILL_OPEN = "still open"  # a stalled connection that the server has not closed
_MIB = 1 << 20
_WORDS = ("fn", "x", "{", "}", " ", "\ufffd", "\x00", "é", "😀", "<|end|>", '"', "\\")
_SERVICE = "/outrider.v1.Generation"
HEALTH = "health "  # before the status of a health check, which has to be OK
_GARBAGE = b"\xff" * 999
_GARBAGE_REFUSED = "no message"  # gRPC refuses malformed protobuf with the code of an unexpected error


@dataclass(frozen=True, slots=True)
class Face:
    """The addresses of an application, the name of its model, and an API key; any key if the server needs none."""

    host: str
    http_port: int
    grpc_port: int
    model: str
    key: str = "none"

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.http_port}"


Answers = Counter[str]
Attack = Callable[[Face], Awaitable[Answers]]
ATTACKS: dict[str, Attack] = {}


def _attack(name: str) -> Callable[[Attack], Attack]:
    def register(attack: Attack) -> Attack:
        ATTACKS[name] = attack
        return attack

    return register


async def _post_all(face: Face, bodies: list[Any], path: str = "/v1/completions", **headers: str) -> Answers:
    """Post all bodies at once: bytes unchanged, others as JSON with the model's name."""
    async with httpx.AsyncClient(base_url=face.url, timeout=_TIMEOUT_S, limits=httpx.Limits()) as client:
        return Counter(await asyncio.gather(*(_post(client, path, face, body, headers) for body in bodies)))


async def _post(client: httpx.AsyncClient, path: str, face: Face, body: Any, headers: dict[str, str]) -> str:
    content = body if isinstance(body, bytes) else json.dumps({"model": face.model, "max_tokens": 8, **body}).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        answer = await client.post(path, content=content, headers={**face.headers, **names})
    except httpx.HTTPError as error:
        return type(error).__name__
    return status_of(answer)


def status_of(answer: httpx.Response) -> str:
    """Return the status, and mark a 503 without Retry-After."""
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and "retry-after" not in answer.headers:
        return "503 without Retry-After"
    return str(answer.status_code)


@_attack("100,000 wrong messages in a body")
async def _wrong_messages(face: Face) -> Answers:
    return await _post_all(face, [{"messages": [1] * 100_000}] * 3, "/v1/chat/completions")


@_attack("500,000 prompts and a million lists in a body")
async def _many_prompts(face: Face) -> Answers:
    return await _post_all(face, [{"prompt": ["a"] * 500_000}, {"prompt": [[5]] * 1_000_000}] * 2)


@_attack("JSON 100,000 levels deep, 100,000 unknown fields, not JSON, numbers out of range")
async def _strange_json(face: Face) -> Answers:
    fields = {f"field_{index}": index for index in range(100_000)}
    number = b'{"model": "%s", "prompt": "x", "temperature": 1e999, "max_tokens": 1%s}' % (
        face.model.encode(),
        b"0" * 5000,
    )
    bodies = [b"[" * 100_000, b'{"a":' * 100_000, {"prompt": "x", **fields}, b"\xff\xfe{}", b"", b"null", number]
    return await _post_all(face, bodies)


@_attack("n = 128, four times, with prompts meanwhile")
async def _many_choices(face: Face) -> Answers:
    return await _post_all(face, [{"prompt": "def f", "n": 128, "max_tokens": 16}] * 4 + [{"prompt": "x"}] * 8)


@_attack("900 biases with n = 32, 2,048 bad words, 10,000 stops")
async def _many_biases(face: Face) -> Answers:
    biases = {str(index): -1.0 for index in range(900)}
    words = [[index % 900 + 1] * (index % 30 + 1) for index in range(2048)]
    bodies = [{"prompt": "x", "n": 32, "logit_bias": biases}, {"prompt": "x", "stop": [str(i) for i in range(10_000)]}]
    return await _post_all(
        face,
        [*bodies, {"prompt": "x", "bad_words_token_ids": words}, {"prompt": "x", "bad_words": ["ab" * 900] * 2048}],
    )


@_attack("40 bodies of a kilobyte that expand to a schema of 340,000 lists, or of 12,000")
async def _packed_schemas(face: Face) -> Answers:
    bodies: list[Any] = []
    for size in (340_000, 12_000):
        schema: dict[str, Any] = {"enum": [[]] * size}
        for field in ({"guided_json": schema}, {"response_format": {"type": "json_object", "schema": schema}}):
            body = {"model": face.model, "max_tokens": 8, "prompt": "x", **field}
            bodies += [gzip.compress(json.dumps(body).encode())] * 10
    return await _post_all(face, bodies, content_encoding="gzip")


@_attack("twelve grammars of 980 rules, two that compile for ever, expressions that explode, deep and circular schemas")
async def _grammars(face: Face) -> Answers:
    rules = "\n".join(f'r{index} ::= "a" r{index + 1} | "b" r{(index * 7) % 980}' for index in range(979))
    grammar = f'root ::= r0\n{rules}\nr979 ::= "c"'
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    circular = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": "(a|b){1,400}"} for i in range(300)},
    }
    bodies: list[Any] = [{"prompt": "x", "guided_grammar": grammar}] * 12
    bodies += [{"prompt": "x", "guided_regex": "(a{1000}){1000}", "n": 32}]
    bodies += [{"prompt": "x", "guided_regex": regex} for regex in ("((a+)+)+b", "(" * 5000, "[^")]
    endless = [{"allOf": [{"type": "string", "pattern": f".*a.{{{gap}}}b.*"} for gap in range(n)]} for n in (30, 31)]
    bodies += [
        {"prompt": "x", "guided_json": schema} for schema in (*endless, deep, circular, wide, '{"const": "\\ud800"}')
    ]
    return await _post_all(face, bodies)


@_attack("a prediction of one token 30,000 times, n = 64")
async def _predictions(face: Face) -> Answers:
    return await _post_all(
        face, [{"prompt": "a a a a", "n": 64, "prediction": {"type": "content", "content": "a " * 15_000}}] * 2
    )


@_attack("a prompt of 7 MiB, a body of 64 MiB, a million ids, a user of 1 MiB, calls of a million lists")
async def _large(face: Face) -> Answers:
    answers = await _post_all(
        face, [{"prompt": "word " * (7 * _MIB // 5)}, b" " * (64 * _MIB), {"prompt": "x", "user": "u" * _MIB}]
    )
    answers += await _post_all(face, [{"prompt": [5] * 1_200_000, "unknown": 1}] * 2)
    call = {"function": {"name": "f", "arguments": "[" + "[]," * 340_000 + "0]"}}
    answers += await _post_all(
        face, [{"messages": [{"role": "assistant", "tool_calls": [call] * 7}]}], "/v1/chat/completions"
    )
    answers += await _post_all(face, [{"prompt": "word " * 400_000}], "/tokenize")
    return answers + await _post_all(face, [{"tokens": [5] * 1_000_000}], "/detokenize")


@_attack("gzip of 512 MiB, truncated gzip, text marked as gzip")
async def _gzip(face: Face) -> Answers:
    bomb = gzip.compress(b"a" * (512 * _MIB), 1)
    return await _post_all(face, [bomb, gzip.compress(b'{"model"' * 99)[:40], b"{}"], Content_Encoding="gzip")


@_attack("400 random bodies")
async def _random_bodies(face: Face) -> Answers:
    generator = random.Random(7)
    fields = [
        "prompt",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "seed",
        "logprobs",
        "speculation",
        "stream",
        "echo",
    ]
    fields += [
        "min_p",
        "logit_bias",
        "response_format",
        "stream_options",
        "best_of",
        "priority",
        "suffix",
        "prediction",
    ]
    values: list[Any] = [None, True, -1, 0, 1.5, 2**63, "", "x", [], {}, [[]], {"a": 1}, [None], "\ud800", 1e308]
    bodies = [
        {"prompt": "x", **{generator.choice(fields): generator.choice(values) for _ in range(generator.randint(1, 4))}}
        for _ in range(400)
    ]
    answers: Answers = Counter()
    for start in range(0, len(bodies), 40):
        answers += await _post_all(face, bodies[start : start + 40])
    return answers


@_attack("texts of half characters and marks, in prompts, chats and stops")
async def _strange_texts(face: Face) -> Answers:
    generator = random.Random(8)
    texts = ["".join(generator.choices(_WORDS, k=200)) for _ in range(20)]
    answers = await _post_all(face, [{"prompt": text, "stop": [text[:20]]} for text in texts])
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    return answers + await _post_all(face, chats, "/v1/chat/completions")


@_attack("200 streams that are left after their first bytes")
async def _leavers(face: Face) -> Answers:
    async def leave() -> str:
        body = {"model": face.model, "prompt": "def f", "max_tokens": 400, "stream": True, "ignore_eos": True}
        try:
            async with (
                httpx.AsyncClient(base_url=face.url, timeout=_TIMEOUT_S, verify=False) as client,  # 200 would load CAs
                client.stream("POST", "/v1/completions", json=body, headers=face.headers) as answer,
            ):
                async for _ in answer.aiter_raw():
                    break
                return status_of(answer)
        except httpx.HTTPError as error:
            return type(error).__name__

    return Counter(await asyncio.gather(*(leave() for _ in range(200))))


@_attack("30 streams with logprobs that are not read")
async def _paused_readers(face: Face) -> Answers:
    body = {"model": face.model, "prompt": "x", "max_tokens": 900, "stream": True, "logprobs": 20, "ignore_eos": True}
    return await _raw(face, 30, _request("POST", "/v1/completions", json.dumps(body).encode()), hold_s=6.0)


@_attack("300 clients that send a header's byte a second, 300 a body's, 300 nothing")
async def _slow_clients(face: Face) -> Answers:
    head = _request("POST", "/v1/completions", b" " * 900)[:-900]
    slow = (_raw(face, 300, head[:30], drip=b"a", hold_s=6.0), _raw(face, 300, head, drip=b" ", hold_s=6.0))
    return sum(await asyncio.gather(*slow, _raw(face, 300, b"", hold_s=6.0)), Counter())


@_attack("1,000 bodies of POST, PUT and GET that stop or trickle after 20 KiB, or before, with a key and without one")
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


@_attack("1,800 connections of two addresses that send nothing, with a health check meanwhile")
async def _idle_connections(face: Face) -> Answers:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    addresses = [f"127.0.0.{2 + rank % 2}" for rank in range(min(1800, most // 2))]
    idle = [asyncio.create_task(_idle_one(face, address)) for address in addresses]
    await asyncio.sleep(3.0)
    async with httpx.AsyncClient(base_url=face.url, timeout=5.0) as client:
        answers = Counter([status_of(await client.get("/live"))])
    return answers + Counter(await asyncio.gather(*idle))


async def _idle_one(face: Face, address: str) -> str:
    writer = None
    try:
        reader, writer = await asyncio.open_connection(face.host, face.http_port, local_addr=(address, 0))
        await asyncio.wait_for(reader.read(), _STALL_S)
    except TimeoutError:
        return STILL_OPEN
    except OSError:
        pass
    finally:
        if writer is not None:
            writer.transport.abort()
    return "closed"


@_attack("malformed HTTP, two lengths in one request, 100 kB of headers")
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


@_attack(
    "gRPC: a message of 20 MiB, 40 of 7 MiB, two of 2 million turns, garbage, 300 Watch and 300 reflection streams"
)
async def _grpc(face: Face) -> Answers:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"{face.host}:{face.grpc_port}", options=options) as channel:
        calls = [_call(channel, f"{_SERVICE}/Generate", payload) for payload in (b"\x0a" * (20 * _MIB), _GARBAGE, b"")]
        prompt = pb2.GenerateRequest(model=face.model, prompt="a" * (7 * _MIB)).SerializeToString()
        calls += [_call(channel, f"{_SERVICE}/Generate", prompt) for _ in range(40)]
        empty_messages = b"\xda\x02\x00" * (7 * _MIB // 3)  # of two bytes for their field, and one for their length
        calls += [_call(channel, f"{_SERVICE}/Generate", empty_messages) for _ in range(2)]
        calls += [_call(channel, "/grpc.health.v1.Health/Watch", b"", timeout_s=4.0) for _ in range(300)]
        calls += [
            _call(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b":\x00")
            for _ in range(300)
        ]
        return Counter(await asyncio.gather(*calls))


@_attack("gRPC: calls that stall, without a key and with one, of every service, with health checks meanwhile")
async def _stalled_calls(face: Face) -> Answers:
    address, part = f"{face.host}:{face.grpc_port}", first_part(17_000, _MIB)
    check, info = "/grpc.health.v1.Health/Check", "/vllm.grpc.engine.VllmEngine/GetModelInfo"
    stalled = [await half_calls(address, check, 60, data=data) for data in (b"", part)]
    for method in (f"{_SERVICE}/Generate", info, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
        stalled += [await half_calls(address, method, 30, data=part, key=key) for key in (None, face.key)]
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            checks = [await _call(channel, check, b"", timeout_s=2.0) for _ in range(20)]
            model = [await _call(channel, f"{_SERVICE}/GetModel", b"", timeout_s=5.0) for _ in range(5)]
        return Counter([f"{HEALTH}{code}" for code in checks] + [f"model {code}" for code in model])
    finally:
        for each in stalled:
            each.close()


@_attack("800 probes of /health and /metrics, 100 at once, without a key")
async def _probes(face: Face) -> Answers:
    async def probe(client: httpx.AsyncClient) -> Answers:
        return Counter([status_of(await client.get(path)) for path in ("/health", "/metrics") * 4])

    async with httpx.AsyncClient(base_url=face.url, timeout=_TIMEOUT_S, limits=httpx.Limits()) as client:
        return sum(await asyncio.gather(*(probe(client) for _ in range(100))), Counter())


@_attack("schemathesis on OpenAI's document and on ours, right and wrong requests")
async def _schemathesis(face: Face) -> Answers:
    settings = {
        "MODE": "all",
        "CHECKS": "not_a_server_error",
        "EXAMPLES": "10",
        "MAX_TIME": "30",
        "OUTRIDER_URL": face.url,
    }
    process = await asyncio.create_subprocess_exec(
        str(_COMPAT), "schemathesis", env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    text = (await process.communicate())[0].decode()
    if process.returncode:
        print(text)
    return Counter(["no 5xx"] if process.returncode == 0 else ["5xx, or schemathesis did not run: see above"])


async def _call(channel: grpc.aio.Channel, method: str, payload: bytes, timeout_s: float = _TIMEOUT_S) -> str:
    try:
        async for _ in channel.unary_stream(method)(payload, timeout=timeout_s):
            pass
    except grpc.aio.AioRpcError as error:
        return _GARBAGE_REFUSED if payload == _GARBAGE else str(error.code().name)
    return "OK"


def _request(method: str, path: str, body: bytes) -> bytes:
    lines = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{method} {path} HTTP/1.1\r\n{lines}".encode() + b"\r\n\r\n" + body


async def _raw(face: Face, number: int, request: bytes, *, drip: bytes = b"", hold_s: float) -> Answers:
    """Open the connections, send the request, then one byte of `drip` per second; read only at the end."""
    return Counter(await asyncio.gather(*(_raw_one(face, request, drip, hold_s) for _ in range(number))))


async def _stall(face: Face, request: bytes, drip: bytes) -> str:
    """Wait until the server closes the connection; return the first answer's status, or `STILL_OPEN`."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(face.host, face.http_port), _TIMEOUT_S)

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
        reader, writer = await asyncio.wait_for(asyncio.open_connection(face.host, face.http_port), _TIMEOUT_S)
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

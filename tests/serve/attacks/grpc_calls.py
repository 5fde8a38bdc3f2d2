"""gRPC calls that are large, wrong, many, or that stall."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter

import grpc

from protos import outrider_pb2 as pb2
from tests.serve.attacks.attack import BROKEN, TIMEOUT_S, Answers, Face, attack

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MAX_FRAME = 1 << 14
_SETTINGS, _HEADERS, _DATA, _RESET, _END_HEADERS = 4, 1, 0, 3, 4
_CANCEL = 8  # the code of a client that cancels


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _header(name: str, value: str) -> bytes:
    """Return a header as a literal without indexing; name and value must be short."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


async def half_calls(
    address: str, method: str, number: int, *, data: bytes = b"", key: str | None = None
) -> asyncio.StreamWriter:
    """Begin calls of a method on one connection; each sends `data` and stays open."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    if key is not None:
        headers["x-api-key"] = key
    block = b"".join(_header(name, value) for name, value in headers.items())
    writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
    for index in range(number):
        stream = 2 * index + 1
        writer.write(_frame(_HEADERS, _END_HEADERS, stream, block))
        for start in range(0, len(data), _MAX_FRAME):
            writer.write(_frame(_DATA, 0, stream, data[start : start + _MAX_FRAME]))
    await writer.drain()
    return writer


def cancels(number: int) -> bytes:
    """Return the frames that cancel the calls of `half_calls`."""
    return b"".join(_frame(_RESET, 0, 2 * index + 1, struct.pack(">I", _CANCEL)) for index in range(number))


def first_part(num_bytes: int, of_bytes: int) -> bytes:
    """Return the first part of a message of that many bytes."""
    return b"\x00" + struct.pack(">I", of_bytes) + b"\x00" * num_bytes


_MIB = 1 << 20
_SERVICE = "/outrider.v1.Generation"
_HEALTH = "/grpc.health.v1.Health"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_FAULTS = {"INTERNAL", "UNKNOWN", "DATA_LOSS"}
_GARBAGE = b"\xff" * 999
_GARBAGE_REFUSED = "no message"  # gRPC refuses malformed protobuf with the code of an unexpected error


@attack("gRPC: a message of 20 MiB, 40 of 7 MiB, two of 2 million turns, garbage, 300 Watch and 300 reflection streams")
async def _grpc(face: Face) -> Answers:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"{face.host}:{face.grpc_port}", options=options) as channel:
        calls = [_call(channel, f"{_SERVICE}/Generate", payload) for payload in (b"\x0a" * (20 * _MIB), _GARBAGE, b"")]
        prompt = pb2.GenerateRequest(model=face.model, prompt="a" * (7 * _MIB)).SerializeToString()
        calls += [_call(channel, f"{_SERVICE}/Generate", prompt) for _ in range(40)]
        empty_messages = b"\xda\x02\x00" * (7 * _MIB // 3)  # of two bytes for their field, and one for their length
        calls += [_call(channel, f"{_SERVICE}/Generate", empty_messages) for _ in range(2)]
        calls += [_call(channel, f"{_HEALTH}/Watch", b"", timeout_s=4.0) for _ in range(300)]
        calls += [_call(channel, _REFLECTION, b":\x00") for _ in range(300)]
        return Counter(await asyncio.gather(*calls))


@attack("gRPC: calls that stall, without a key and with one, of every service, with health checks meanwhile")
async def _stalled_calls(face: Face) -> Answers:
    address, part = f"{face.host}:{face.grpc_port}", first_part(17_000, _MIB)
    check, info = f"{_HEALTH}/Check", "/vllm.grpc.engine.VllmEngine/GetModelInfo"
    stalled = [await half_calls(address, check, 60, data=data) for data in (b"", part)]
    for method in (f"{_SERVICE}/Generate", info, _REFLECTION):
        stalled += [await half_calls(address, method, 30, data=part, key=key) for key in (None, face.key)]
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            model = [await _call(channel, f"{_SERVICE}/GetModel", b"", timeout_s=5.0) for _ in range(5)]
            return await _checks(channel, 20) + Counter(f"model {code}" for code in model)
    finally:
        for each in stalled:
            each.close()


@attack("gRPC: eight stalled calls that are cancelled, twenty times, of every service, with a health check after each")
async def _cancelled_calls(face: Face) -> Answers:
    answers: Answers = Counter()
    async with grpc.aio.insecure_channel(f"{face.host}:{face.grpc_port}") as channel:
        for method in (f"{_HEALTH}/Check", f"{_SERVICE}/Generate", "/vllm.grpc.engine.VllmEngine/Abort", _REFLECTION):
            for _ in range(5):
                writer = await half_calls(
                    f"{face.host}:{face.grpc_port}", method, 8, data=b"\0\0\0\0\x10", key=face.key
                )
                await asyncio.sleep(0.1)
                writer.write(cancels(8))
                answers += await _checks(channel, 1)
                writer.close()
        reflected = await _call(channel, _REFLECTION, b":\x00", timeout_s=5.0)
        listed = await _call(channel, f"{_HEALTH}/List", b"", timeout_s=5.0)
    return answers + Counter([f"reflection {reflected}", f"health list {listed}"])


async def _checks(channel: grpc.aio.Channel, number: int) -> Answers:
    codes = [await _call(channel, f"{_HEALTH}/Check", b"", timeout_s=2.0) for _ in range(number)]
    return Counter(f"health {code}" if code == "OK" else f"{BROKEN}health {code}" for code in codes)


async def _call(channel: grpc.aio.Channel, method: str, payload: bytes, timeout_s: float = TIMEOUT_S) -> str:
    try:
        async for _ in channel.unary_stream(method)(payload, timeout=timeout_s):
            pass
    except grpc.aio.AioRpcError as error:
        code = str(error.code().name)
        return _GARBAGE_REFUSED if payload == _GARBAGE else f"{BROKEN}{code}" if code in _FAULTS else code
    return "OK"

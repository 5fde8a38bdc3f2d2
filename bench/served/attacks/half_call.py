"""Calls that stall, in hand-made HTTP/2 frames: no gRPC client sends half a message."""

from __future__ import annotations

import asyncio
import struct

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

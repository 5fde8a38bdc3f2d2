"""Typed messages over a stream of bytes: each frame is a 4-byte length and a msgpack body."""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")

Incoming = TypeVar("Incoming")


class ConnectionLostError(ConnectionError):
    """The peer closed, died, broke the protocol, or did not read in time."""


class FrameCodec(Generic[Incoming]):
    """Encodes any message, and decodes `incoming` messages from a stream of arbitrary pieces."""

    def __init__(self, incoming: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._buffer = bytearray()

    def encode(self, message: Any) -> bytes:
        body = self._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def feed(self, data: bytes) -> list[Incoming]:
        """Return the messages that `data` completes, in order.

        Raises:
            ConnectionLostError: the stream breaks the protocol; nothing after this point can be decoded.
        """
        self._buffer += data
        messages: list[Incoming] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ConnectionLostError(f"a frame of {length} bytes is longer than the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decode(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return messages

    def _decode(self, body: bytes) -> Incoming:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ConnectionLostError(f"a frame does not follow the protocol: {error}") from error

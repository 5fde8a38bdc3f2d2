"""A client of server-sent events that takes little processor time, because it shares the cores with the server.

While streams run, it keeps bytes with the time of their arrival and parses nothing. It parses when all have ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

Body = dict[str, Any]  # of a request, JSON


@dataclass(frozen=True, slots=True)
class Event:
    """An event's JSON, and the seconds from the start of the run to its last byte."""

    seconds: float
    data: Body


@dataclass(frozen=True, slots=True)
class Streams:
    """The events of each stream, and the wall seconds of all of them together."""

    events: list[list[Event]]
    seconds: float


def run_streams(url: str, bodies: Seq[Body], timeout_s: float) -> Streams:
    """POST all bodies to `url` at once, each on a connection of its own, and return the events of the answers.

    Raises:
        RuntimeError: An answer has another status than 200, or an event is an error.
        h11.RemoteProtocolError: An answer is cut short.
        TimeoutError: An answer has not ended within `timeout_s`.
    """
    return asyncio.run(asyncio.wait_for(_run(url, bodies), timeout_s))


async def _run(url: str, bodies: Seq[Body]) -> Streams:
    began = time.perf_counter()
    requests = [await post(url, body) for body in bodies]
    await asyncio.gather(*(request.has_ended for request in requests))
    seconds = time.perf_counter() - began
    return Streams([list(request.events(began)) for request in requests], seconds)


async def post(url: str, body: Body) -> EventRequest:
    """POST a body to `url` and return the request; await its `has_ended` before its events."""
    parts = urlsplit(url)
    request = EventRequest(parts.netloc, parts.path, body)
    assert parts.hostname is not None, "an address of a server"
    await asyncio.get_running_loop().create_connection(lambda: request, parts.hostname, parts.port or 80)
    return request


@dataclass(eq=False)
class EventRequest(asyncio.Protocol):
    """A request on a connection of its own, which the server closes after the answer."""

    host: str
    path: str
    body: Body
    has_ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _received: list[tuple[float, bytes]] = field(default_factory=list)
    _http: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = json.dumps(self.body).encode()
        headers = [("host", self.host), ("connection", "close"), ("content-length", str(len(body)))]
        head = h11.Request(method="POST", target=self.path, headers=[*headers, ("content-type", "application/json")])
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        transport.write(b"".join(self._http.send(event) or b"" for event in events))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._received.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.has_ended.done():
            self.has_ended.set_result(None)

    def events(self, began: float) -> Iterator[Event]:
        """Yield the events of an answer that has ended."""
        status, text = 0, b""
        for arrival, data in [*self._received, (0.0, b"")]:  # no bytes: the end of the connection
            self._http.receive_data(data)
            while (part := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(part, h11.Response):
                    status = part.status_code
                elif isinstance(part, h11.Data):
                    text += part.data
                elif isinstance(part, h11.ConnectionClosed):
                    break
            *lines, text = text.split(b"\n") if status == 200 else [text]
            for line in lines:
                if line.startswith(b"data: {"):
                    event = Event(arrival - began, json.loads(line[6:]))
                    if "error" in event.data:
                        raise RuntimeError(f"{self.path}: {event.data['error']}")
                    yield event
        if status != 200:
            raise RuntimeError(f"{self.path}: status {status}: {text.decode(errors='replace')}")

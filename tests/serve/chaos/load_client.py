"""The client of `make overload`, cheap because it shares the cores with its server: callbacks, no task per request."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

OK, REFUSED, NO_ANSWER = 200, 503, 0
_ANSWER_TIMEOUT_S = 180.0
_POLL_S = 0.05
_NUM_CHOICES = (1, 2, 4)
_MAX_TOKENS = (64, 128, 192)
_HEAD_END = b"\r\n\r\n"
_STATUS = slice(9, 12)  # of the first line
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_BY_PROXY = b"The pairs are full"  # cluster/proxy/refusals.cfg


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """One request: its tenant, the status, the tokens of all choices, when it was sent and when it had its answer.

    `is_by_proxy`: HAProxy has refused it by itself.
    """

    tenant: str
    status: int
    num_tokens: int
    sent_s: float
    ended_s: float
    is_by_proxy: bool


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    """A request under way, and the function that gets its answer."""

    tenant: str
    sent_s: float
    on_answer: Callable[[LoadAnswer], None]

    def answer(self, status: int, body: bytes) -> None:
        try:
            num_tokens = json.loads(body)["usage"]["completion_tokens"] if status == OK else 0
        except (ValueError, KeyError):
            status, num_tokens = NO_ANSWER, 0
        is_by_proxy = status == REFUSED and _BY_PROXY in body
        self.on_answer(LoadAnswer(self.tenant, status, num_tokens, self.sent_s, time.monotonic(), is_by_proxy))


class _Connection(asyncio.Protocol):
    """A connection that the server keeps open between requests, since a new one costs more than a refusal."""

    _transport: asyncio.Transport

    def __init__(self, idle: list[_Connection], busy: set[_Connection]) -> None:
        self._idle, self._busy = idle, busy
        self._request: _PendingRequest | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, content: bytes, request: _PendingRequest) -> None:
        self._request = request
        self._busy.add(self)
        self._transport.write(content)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(_HEAD_END)
        length = _LENGTH.search(head)
        if end and self._request is not None and len(body) >= (int(length[1]) if length else 0):
            request, self._request, self._received = self._request, None, b""
            self._busy.discard(self)
            self._idle.append(self)
            request.answer(int(head[_STATUS]), body)

    def connection_lost(self, error: Exception | None) -> None:
        if self._request is not None:
            self._busy.discard(self)
            self._request.answer(NO_ANSWER, b"")
        elif self in self._idle:
            self._idle.remove(self)

    def abort(self) -> None:
        self._transport.abort()


class LoadClient:
    """Requests of tenants in turn, on kept connections, of sizes that a seed fixes."""

    def __init__(self, port: int, model: str, tenants: Sequence[str]) -> None:
        self._port = port
        self._random = random.Random(11)
        self._tenants = itertools.cycle(tenants)
        self._templates = {tenant: _templates(model, tenant) for tenant in tenants}
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def send(self, on_answer: Callable[[LoadAnswer], None]) -> None:
        """Send one request; `on_answer` gets its answer, or the status `NO_ANSWER` without one."""
        tenant = next(self._tenants)
        content = self._random.choice(self._templates[tenant]) % self._random.randrange(10**6)
        request = _PendingRequest(tenant, time.monotonic(), on_answer)
        if self._idle:
            self._idle.pop().send(content, request)
            return
        opening = asyncio.create_task(self._send_on_new(content, request))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def request(self) -> LoadAnswer:
        """Send one request, and return its answer."""
        answer: asyncio.Future[LoadAnswer] = asyncio.get_running_loop().create_future()
        self.send(answer.set_result)
        return await answer

    async def settle(self) -> None:
        """Return when every request has its answer; those without one after `_ANSWER_TIMEOUT_S` are cut off."""
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while self._opening or self._busy:
            if time.monotonic() > deadline_s:
                for connection in tuple(self._busy):
                    connection.abort()
            await asyncio.sleep(_POLL_S)

    async def _send_on_new(self, content: bytes, request: _PendingRequest) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._idle, self._busy), "127.0.0.1", self._port
            )
        except OSError:
            request.answer(NO_ANSWER, b"")
        else:
            connection.send(content, request)


def _templates(model: str, tenant: str) -> list[bytes]:
    """Return a request of each size, whose prompt lacks a number of six digits."""
    return [
        _template(model, tenant, num_choices, max_tokens) for num_choices in _NUM_CHOICES for max_tokens in _MAX_TOKENS
    ]


def _template(model: str, tenant: str, num_choices: int, max_tokens: int) -> bytes:
    body = {
        "model": model,
        "prompt": "def function_%06d(path):\n",
        "n": num_choices,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": 1,
    }
    content = json.dumps(body)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer key-of-{tenant}\r\nContent-Length: {len(content % 0)}\r\n\r\n"
    )
    return (head + content).encode()

"""HTTP to a server that may send anything: whole answers and events in time, or `NoVerdictError` with a sentence."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from protos.client_text import for_log

TIMEOUT_S = 60.0
_MAX_BYTES = 64 << 20  # of an answer
Body = dict[str, Any]


class NoVerdictError(Exception):
    """A check cannot reach a verdict; the message is a sentence for the report."""


class RefusedError(NoVerdictError):
    """The server refuses a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server refuses with status {status}: {message}")
        self.status = status
        self.message = message


async def fetch(http: httpx.AsyncClient, method: str, url: str, body: Any, timeout_s: float) -> httpx.Response:
    """Return a whole answer.

    Raises:
        NoVerdictError: it is late, broken or too long.
    """
    async with open_answer(http, method, url, body, timeout_s) as response:
        return await whole(response)


@asynccontextmanager
async def open_answer(
    http: httpx.AsyncClient, method: str, url: str, body: Any, timeout_s: float
) -> AsyncIterator[httpx.Response]:
    """Open an answer that must end in time, however slowly its bytes come."""
    try:
        async with asyncio.timeout(timeout_s), http.stream(method, url, json=body, timeout=timeout_s) as response:
            yield response
    except (TimeoutError, httpx.TimeoutException):
        raise NoVerdictError(f"the server does not answer (no whole answer within {timeout_s:.0f} s)") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoVerdictError(f"the server does not answer ({error or type(error).__name__})") from None


async def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > _MAX_BYTES:
            raise NoVerdictError(f"an answer is longer than {_MAX_BYTES >> 20} MiB")
        yield part


async def whole(response: httpx.Response) -> httpx.Response:
    """Return an answer once all of it is there; of its headers only the time to wait."""
    headers = {"retry-after": response.headers.get("retry-after", "")}
    return httpx.Response(
        response.status_code, headers=headers, content=b"".join([each async for each in _parts(response)])
    )


async def events(response: httpx.Response) -> AsyncIterator[tuple[float, Body]]:
    """Yield the events of a streamed answer with their times. Raises NoVerdictError for one in another form."""
    rest = b""
    async for part in _parts(response):
        *lines, rest = (rest + part).split(b"\n")
        for data in (line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")):
            if data != b"[DONE]":
                yield time.monotonic(), _event(data)


def _event(data: bytes) -> Body:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NoVerdictError(f"a stream has an event that is not JSON ({error})"[:300]) from None
    if not isinstance(event, dict):
        raise NoVerdictError(f"a stream has the event {data[:60]!r}")
    return event


def message_of(response: httpx.Response) -> str:
    """Return the reason of a refusal, for a terminal."""
    try:
        error = response.json()
        error = error.get("error", error)
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return for_log(" ".join(str(text).split())) or "no reason given"


def retry_after(response: httpx.Response, default_s: float) -> float:
    """Return the seconds that a busy server asks for, else the default."""
    try:
        return max(0.05, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return default_s
